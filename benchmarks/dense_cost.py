"""Time a step of timm's densenet121 while its dense blocks learn their wiring, frozen, and pruned.

Seconds of CPU time of one forward and backward pass: the shortest of several, run in turn on one core. Needs timm
(`make test-integrations` installs it).

python benchmarks/dense_cost.py --side 64
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc

BLOCKS = [f"features.denseblock{number}" for number in range(1, 5)]
IMAGES, TURNS = 8, 6


def networks(x: Tensor, fan_in: int) -> dict[str, nn.Module]:
    """Return the same network: plain, learning in two ways, frozen and pruned."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integrations"))
    importlib.import_module("torchvision_operators")
    timm: Any = importlib.import_module("timm")
    plain = timm.create_model("densenet121", num_classes=IMAGES)
    learning = [mc.rewire(copy.deepcopy(plain), BLOCKS, fan_in) for _ in range(2)]
    optimizer = torch.optim.SGD(mc.param_groups(learning[1], lr=0.0, mask_lr=0.0))
    mc.attach(optimizer, learning[1], mc.Blend(steps=1000))
    frozen = mc.rewire(copy.deepcopy(plain), BLOCKS, fan_in, connectivity="random")
    pruned = mc.prune(frozen, x, merge=False)
    return {"plain": plain, "Draw": learning[0], "Blend": learning[1], "frozen": frozen, "pruned": pruned}


def step(network: nn.Module, x: Tensor) -> float:
    """Return the CPU time of one step, without the optimizer."""
    network.train().zero_grad()
    start = time.process_time()
    F.cross_entropy(network(x), torch.arange(IMAGES)).backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


@torch.no_grad()
def inference(network: nn.Module, x: Tensor) -> float:
    """Return the CPU time of one forward pass in eval mode."""
    network.eval()
    start = time.process_time()
    network(x)
    return time.process_time() - start


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64, help="side of the images (default: 64)")
    parser.add_argument("--fan-in", type=int, default=4, help="K (default: 4)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(IMAGES, 3, given.side, given.side)
    made = networks(x, given.fan_in)
    steps: dict[str, list[float]] = {name: [] for name in made}
    passes: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(TURNS):
        for name, network in made.items():
            steps[name].append(step(network, x))
            passes[name].append(inference(network, x))
    print("| network | weights | step, s | of plain | inference, s | of plain |\n|---|---|---|---|---|---|")
    for name, network in made.items():
        weights = mc.count_parameters(network).weights
        cells = [f"{weights:,}"]
        for found in (steps, passes):
            cells += [f"{min(found[name]):.3f}", f"{100 * min(found[name]) / min(found['plain']):.0f} %"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
