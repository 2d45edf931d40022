"""Accuracy of a trained DenseNet whose layers read only K sources, by initial masks: a table in research/log.md.

A DenseNet of two blocks of 8 layers is trained on 400 of scikit-learn's digits; then both blocks are rewired with
fan-in K. The table has the accuracy with the top-K at once; the accuracy after 12 more epochs, 8 while masks learn and
4 frozen; and the weights that pruning leaves.

python benchmarks/dense_start.py --seeds 4
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rewire_start import BATCH, accuracy, data, train
from torch import nn

import maskconnect as mc
from maskconnect.core.count import pruned_parameters

STARTS: tuple[str | float, ...] = ("uniform", 0.01)
BLOCKS = ["1", "3"]
EPOCHS = {"trained": 10, "learning": 8, "frozen": 4}


def densenet() -> nn.Module:
    """Return two dense blocks, with a transition between them that halves the side."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    block: Any = importlib.import_module("dense").Block
    transition = nn.Sequential(nn.BatchNorm2d(80), nn.ReLU(), nn.Conv2d(80, 40, 1), nn.AvgPool2d(2))
    head = (nn.BatchNorm2d(104), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(104, 10))
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), block(8, 16, 8), transition, block(8, 40, 8), *head)


def main() -> None:
    """Print a Markdown table, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="number of networks, from seed 0 (default: 4)")
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    images, labels = data()
    x, y, test_x, test_y = images[:400], labels[:400], images[400:], labels[400:]
    trained = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = densenet()
        train(model, x, y, EPOCHS["trained"], lr=0.05, seed=seed)
        trained.append(model)
    print(
        "| K | masks start | accuracy at once | after 12 epochs | deviation | weights left |\n|---|---|---|---|---|---|"
    )

    def row(fan_in: int | None, start: str | float, connectivity: str) -> None:
        found: list[tuple[float, float, float]] = []
        for seed, model in zip(seeds, trained, strict=True):
            given: dict[str, Any] = {"connectivity": connectivity, "mask_init": start, "seed": 2 * seed}
            new = mc.rewire(copy.deepcopy(model), BLOCKS, fan_in, **given)
            at_once = accuracy(new, test_x, test_y)
            blend = mc.Blend(steps=EPOCHS["learning"] * -(-len(x) // BATCH))
            train(new, x, y, EPOCHS["learning"], lr=0.02, seed=seed, how=blend)
            mc.freeze(new)
            train(new, x, y, EPOCHS["frozen"], lr=0.01, seed=seed)
            count = pruned_parameters(new)
            found.append((at_once, accuracy(new, test_x, test_y), 100 * count.transitive / count.weights))
        means = [statistics.mean(column) for column in zip(*found, strict=True)]
        spread = statistics.stdev(after for _, after, _ in found) if len(found) > 1 else 0.0
        name = start if connectivity == "learned" else f"({connectivity})"
        cells = (fan_in or "all", name, f"{means[0]:.1f}", f"{means[1]:.1f}", f"{spread:.1f}", f"{means[2]:.0f} %")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)

    row(None, "uniform", "full")
    for fan_in in (1, 4):
        row(fan_in, "uniform", "random")
        for start in STARTS:
            row(fan_in, start, "learned")


if __name__ == "__main__":
    main()
