"""Measure the cost of training one network with several ranks: steps of two ranks on this machine, timed in turn.

OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 benchmarks/ranks_cost.py        # two minutes

alone         the part of one rank, without communication
averaged      with DistributedDataParallel, as `maskconnect train` runs it: idle blocks are in the graph
find unused   the same with find_unused_parameters=True, which searches the graph in every step
statistics    averaged, and the statistics of batch norms too, as local norms require
synced        averaged, with batch norms over both ranks
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics as numbers
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import maskconnect as mc
from maskconnect.models.synced import synchronize_norms_
from maskconnect.training.norms import average_statistics_
from maskconnect.training.ranks import averaged, join, leave

HERE = Path(__file__).parent
VARIANTS = ("alone", "averaged", "find unused", "statistics", "synced")


def step_of(variant: str, network: nn.Module, images: int) -> Callable[[], None]:
    """Return a learning step of one rank."""
    ranks = join()
    network = copy.deepcopy(network)
    if variant == "synced":
        synchronize_norms_(network)
    optimizer = torch.optim.SGD(mc.param_groups(network, lr=0.01, mask_lr=0.01, weight_decay=1e-4), momentum=0.9)
    mc.attach(optimizer, network)
    forward = network
    if variant == "find unused":
        forward = DistributedDataParallel(network, find_unused_parameters=True, forward_sync_buffers=False)
    elif variant != "alone":
        forward = averaged(network)
    x, y = torch.randn(images, 3, 32, 32), torch.randint(100, (images,))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(forward(x), y).backward()  # type: ignore[no-untyped-call]
        if variant == "statistics":
            average_statistics_(network, ranks)
        optimizer.step()

    return step


def measure(network: nn.Module, images: int, rounds: int) -> dict[str, float]:
    """Return the median time of a step of each variant, in seconds; both ranks start each step together."""
    steps, ranks = {variant: step_of(variant, network, images) for variant in VARIANTS}, join()
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds + 1):
        for variant, step in steps.items():
            ranks.wait()
            start = time.perf_counter()
            step()
            if number:  # the first one creates lasting state
                found[variant].append(time.perf_counter() - start)
    return {variant: numbers.median(times) for variant, times in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--numbers", type=Path, default=HERE / "ranks_cost.json")
    args = parser.parse_args()
    ranks = join()
    torch.manual_seed(0)
    networks = {
        "ResNet-38, K=10": mc.resnet(38, 100, fan_in=10),
        "ResNeXt {29,8,8}, K=4": mc.resnext(29, 8, 8, 100, fan_in=4),
    }
    found = {}
    for name, network in networks.items():
        found[name] = measure(network, args.images, args.rounds)
        if ranks.first:
            over = {variant: seconds / found[name]["alone"] for variant, seconds in found[name].items()}
            print(f"{name}, {args.images} images per rank; a step alone takes {found[name]['alone']:.3f} s")
            print("".join(f"  {variant:12s} {ratio:.2f}\n" for variant, ratio in over.items()), flush=True)
    if ranks.first:
        text = json.dumps({"ranks": ranks.count, "images": args.images, "median_seconds": found}, indent=1)
        args.numbers.write_text(text + "\n")
    leave(ranks)


if __name__ == "__main__":
    main()
