"""Accuracy of a trained network after rewiring, by initial masks: the table in research/log.md.

A ResNet-20 is trained on scikit-learn's digits, then rewired with fan-in K. The table has the accuracy with the top-K
at once; the loss over 40 draws before learning; the accuracy after three more epochs, with masks learned, then frozen.

python benchmarks/rewire_start.py --seeds 4
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core.learning import Learning
from maskconnect.core.lookup import masks_of

BATCH = 32
STARTS: tuple[str | float, ...] = ("uniform", 0.5, 0.1, 0.01)


def data() -> tuple[Tensor, Tensor]:
    """Return scaled images and labels, shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return images[order], torch.tensor(digits.target)[order]


def train(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float, seed: int, how: Learning | None = None
) -> None:
    """Train with SGD in batches of 32; masks, if there are any, learn as `how` says."""
    optimizer = torch.optim.SGD(mc.param_groups(model.train(), lr=lr, mask_lr=0.03, weight_decay=1e-4), momentum=0.9)
    if masks_of(model):
        mc.attach(optimizer, model, how)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in percent, in eval mode."""
    scores: Tensor = model.eval()(x)
    return 100 * (scores.argmax(1) == y).float().mean().item()


@torch.no_grad()
def drawn_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean loss over 40 draws, with the rest of the network in eval mode."""
    model.eval()
    for part in model.modules():
        part.training = isinstance(part, mc.MaskedStack)
    return statistics.mean(F.cross_entropy(model(x), y).item() for _ in range(40))


def main() -> None:
    """Print a Markdown table, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="number of networks, from seed 0 (default: 4)")
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    images, labels = data()
    x, y, test_x, test_y = images[:1200], labels[:1200], images[1200:], labels[1200:]
    trained = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = mc.resnet(20, 10, connectivity="prev", in_channels=1)
        train(model, x, y, epochs=4, lr=0.05, seed=seed)
        trained.append(model)
    print("| K | masks start | accuracy at once | loss over draws | accuracy after 3 epochs |\n|---|---|---|---|---|")

    def row(fan_in: int, start: str | float, connectivity: str) -> None:
        found: list[tuple[float, float, float]] = []
        for seed, model in zip(seeds, trained, strict=True):
            new = copy.deepcopy(model)
            assert isinstance(new.stack, mc.MaskedStack)
            new.stack = nn.Sequential(*new.stack.flat())
            mc.rewire(new, "stack", fan_in, connectivity=connectivity, mask_init=start, seed=seed)
            at_once, loss = accuracy(new, test_x, test_y), drawn_loss(copy.deepcopy(new), test_x, test_y)
            train(new, x, y, epochs=2, lr=0.01, seed=seed)
            mc.freeze(new)
            train(new, x, y, epochs=1, lr=0.01, seed=seed)
            found.append((at_once, loss, accuracy(new, test_x, test_y)))
        means = [statistics.mean(column) for column in zip(*found, strict=True)]
        name = start if connectivity == "learned" else f"({connectivity})"
        print(f"| {fan_in} | {name} | {means[0]:.1f} | {means[1]:.2f} | {means[2]:.1f} |", flush=True)

    row(1, "uniform", "prev")
    for fan_in in (1, 2, 4):
        for start in STARTS:
            row(fan_in, start, "learned")


if __name__ == "__main__":
    main()
