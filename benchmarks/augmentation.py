"""Time reading and augmenting an epoch of CIFAR, relative to training ResNet-38 on it: the line in research/log.md.

python benchmarks/augmentation.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.data import Arrays, Augmentation, Batches, mean_of


def main() -> None:
    """Print the time for an epoch of 50,000 images, and its ratio to training on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed, in turn (default: 3)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8)
    train = Arrays(images, torch.randint(0, 100, (50_000,)), tuple(map(str, range(100))))
    plan = Augmentation(size=32, pad=4, flip=True)
    batches = Batches(images=train, plan=plan, size=128, mean=mean_of(train, plan), training=True)
    model = mc.resnet(38, 100, connectivity="prev")
    epochs, steps = [], []
    for number in range(rounds):
        start = time.perf_counter()
        for x, y in batches.epoch(number):
            last = x, y
        epochs.append(time.perf_counter() - start)
        x, y = next(batches.epoch(number))
        assert last[0].shape[1:] == x.shape[1:]
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        steps.append(time.perf_counter() - start)
    training = min(steps) * len(batches)
    print(f"an epoch of 50,000 images: {min(epochs):.2f} s of one core (slowest {max(epochs):.2f} s)")
    print(f"training ResNet-38 on them, from one step of 128: {training:.0f} s; ratio {min(epochs) / training:.4f}")


if __name__ == "__main__":
    main()
