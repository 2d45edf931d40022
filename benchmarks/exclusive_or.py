"""Does learning find a pair of sources that matters only together? The second table in research/log.md.

python benchmarks/exclusive_or.py --seeds 4
"""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskconnect as mc

EYES = 8


def main() -> None:
    """Print a Markdown table, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds, from 0 (default: 4)")
    seeds = parser.parse_args().seeds
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    torch.set_num_threads(1)
    mlp: Any = importlib.import_module("mlp")
    mlp.batch = partial(batch, pair=mlp.SIGNAL)
    given: list[Any] = [[[] for _ in range(EYES)], [list(mlp.SIGNAL)]]
    cases: list[tuple[str, Any, float, int]] = [("given", given, 0.1, 400)]
    cases += [("full", "full", 0.1, steps) for steps in (400, 2000)]
    drawn, blended = "learned, as in the paper", "learned"
    cases += [(drawn, "learned", rate, 400) for rate in (0.03, 0.1, 0.3)] + [(drawn, "learned", 0.1, 2000)]
    cases += [(blended, "learned", 0.03, steps) for steps in (400, 1000, 2000)]
    print("| wiring | mask rate | steps | test accuracy % | found the pair |\n|---|---|---|---|---|")
    for name, connectivity, rate, steps in cases:
        how = mc.Blend(steps=steps) if name == blended else mc.Draw()
        runs = [mlp.train(connectivity, seed, how, rate, steps) for seed in range(seeds)]
        found = sum(mc.wiring_of(model)[1][0] == list(mlp.SIGNAL) for model, _ in runs)
        accuracies = " ".join(f"{100 * accuracy:.1f}" for _, accuracy in runs)
        learned = (f"{rate}", f"{found} of {seeds}") if connectivity == "learned" else ("", "")
        print(f"| {name} | {learned[0]} | {steps} | {accuracies} | {learned[1]} |", flush=True)


def batch(size: int, seed: int, pair: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the inputs of all eyes, and whether exactly one of the pair sees a sum above 0."""
    x = torch.randn(size, 4 * EYES, generator=torch.Generator().manual_seed(seed))
    first, second = (x[:, 4 * k : 4 * k + 4].sum(dim=1) > 0 for k in pair)
    return x, (first ^ second).long()


if __name__ == "__main__":
    main()
