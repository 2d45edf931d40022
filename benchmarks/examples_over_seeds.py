"""Test accuracy of each example's network under each connectivity, over seeds: the table in research/log.md.

python benchmarks/examples_over_seeds.py --seeds 5
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from pathlib import Path

import torch

import maskconnect as mc

CASES = {
    "mlp": ("learned", "as in the paper", "random", "full"),
    "transformer": ("learned", "as in the paper", "random", "prev", "full"),
    "convnet": ("learned", "as in the paper", "random", "prev", "full"),
}
PAPER = {"how": mc.Draw(), "mask_lr": 0.1}  # masks are drawn, and learn from the plain gradient


def main() -> None:
    """Print a Markdown table, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0; at least 2 (default: 5)")
    seeds = parser.parse_args().seeds
    if seeds < 2:
        parser.error(f"--seeds is {seeds}; a standard deviation needs at least 2")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    torch.set_num_threads(1)  # as the examples do themselves
    print("| example | connectivity | n | mean % | std | each |\n|---|---|---|---|---|---|")
    for name, kinds in CASES.items():
        train = importlib.import_module(name).train
        for kind in kinds:
            how = PAPER if kind == "as in the paper" else {"connectivity": kind}
            found = [100 * train(**how, seed=seed)[1] for seed in range(seeds)]
            mean, std = statistics.mean(found), statistics.stdev(found)
            each = " ".join(f"{accuracy:.1f}" for accuracy in found)
            print(f"| {name} | {kind} | {seeds} | {mean:.2f} | {std:.2f} | {each} |", flush=True)


if __name__ == "__main__":
    main()
