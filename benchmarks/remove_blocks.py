"""Which blocks can a trained network lose? The tables of research/budget.md.

A ResNet and a ViT of 12 blocks are trained on 16x16 images of CIFAR-10. Each is then cut to a part of its parameters
(--keep) and fine-tuned for the same number of steps. The blocks are chosen in several ways:

    learned   mc.Blend(steps=N, keep=...) learns for the first half of the steps, then the wiring is frozen
    random    random blocks are dropped, then fine-tuning
    even      evenly spaced blocks
    alike     the blocks whose input and output are most alike (cosine similarity, as in ShortGPT)
    scratch   the network that `even` keeps, trained from random weights for all steps: training and fine-tuning
    again     a control with more steps: the blocks that `learned` found are kept from the start

Only `learned` may drop a block that changes the shape. Every finished run is a line of runs-NETWORK.jsonl in --folder,
and is not repeated. --collect writes all of them to benchmarks/remove_blocks.json, and --show prints its tables.

    OMP_NUM_THREADS=1 python benchmarks/remove_blocks.py resnet --data data --folder runs/remove_blocks
    python benchmarks/remove_blocks.py --folder runs/remove_blocks --collect
    python benchmarks/remove_blocks.py --show --figure research/images/budget.png
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from remove_blocks_networks import parts_of
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.data.catalog import load
from maskconnect.data.sets import Arrays
from maskconnect.experiments.layout import Table
from maskconnect.training.files import write_atomically
from maskconnect.training.statistics import difference_by_seed, statistic

RESULTS = Path(__file__).with_suffix(".json")
NETWORKS = ("resnet", "vit")
METHODS = ("learned", "random", "even", "alike", "scratch", "again")
KEEPS = (0.8, 0.55, 0.3)
TRAIN, VALIDATION, BATCH = 10_000, 4_000, 64
EPOCHS, FINE_EPOCHS = 8, 3  # of training, and of fine-tuning
LR = {"resnet": 3e-3, "vit": 2e-3}  # AdamW, with warm-up and then linear decay to 0
FINE_LR = {"resnet": 1.5e-3, "vit": 1e-3}
WEIGHT_DECAY = 0.05
LEARNING = 0.5  # the share of fine-tuning in which masks learn
MASK_LR = 0.01


Runs = list[dict[str, Any]]


def removable(parts: Sequence[nn.Module]) -> list[int]:
    """Return the blocks whose output has the shape of their input."""
    inner = range(1, len(parts) - 1)
    return [k for k in inner if isinstance(getattr(parts[k], "shortcut", nn.Identity()), nn.Identity)]


def sizes_of(parts: Sequence[nn.Module]) -> list[int]:
    """Return the number of parameters of each part."""
    return [sum(p.numel() for p in part.parameters()) for part in parts]


@dataclass(frozen=True)
class Data:
    """Images as float tensors, prepared once."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches in a seeded order; flip images with probability 1/2, and shift batches by up to two pixels."""
        images, labels = self.train
        chance = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(labels), generator=chance)
            for start in range(0, len(order), BATCH):
                index = order[start : start + BATCH]
                x = images[index]
                flip = torch.rand(len(x), generator=chance) < 0.5
                x = torch.where(flip[:, None, None, None], x.flip(3), x)
                down, right = torch.randint(0, 5, (2,), generator=chance).tolist()
                yield F.pad(x, (2, 2, 2, 2))[:, :, down : down + 16, right : right + 16], labels[index]


def read_data(root: Path) -> Data:
    """Load CIFAR-10 at half its size; validation images are not used for training."""
    found = load("cifar10", root, validation=VALIDATION)
    assert isinstance(found.train, Arrays)
    assert isinstance(found.test, Arrays)
    assert isinstance(found.validation, Arrays)
    images = found.train.images[:TRAIN].float()
    mean, scale = images.mean(), images.std()

    def small(arrays: Arrays, count: int) -> tuple[Tensor, Tensor]:
        return F.avg_pool2d((arrays.images[:count].float() - mean) / scale, 2), arrays.labels[:count]

    return Data(small(found.train, TRAIN), small(found.validation, VALIDATION), small(found.test, 10_000))


def steps_of(epochs: int) -> int:
    """Return the number of optimizer steps."""
    return epochs * math.ceil(TRAIN / BATCH)


def train(model: nn.Module, data: Data, epochs: int, lr: float, seed: int, how: mc.Blend | None = None) -> None:
    """Train with AdamW; the learning rate warms up over a tenth of the steps, then decays linearly to 0.

    If masks learn, they are frozen after `how.steps`.
    """
    optimizer, steps = torch.optim.AdamW(mc.param_groups(model, lr, MASK_LR, WEIGHT_DECAY)), steps_of(epochs)
    if how is not None:
        mc.attach(optimizer, model, how)
    model.train()
    for step, (x, y) in enumerate(data.batches(epochs, seed)):
        if how is not None and step == how.steps:
            mc.freeze(model)
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / (0.1 * steps), 1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    """Return the accuracy in percent."""
    model.eval()
    images, labels = part
    found = torch.cat([model(images[start : start + 500]).argmax(dim=1) for start in range(0, len(images), 500)])
    return 100 * float((found == labels).double().mean())


def trained(network: str, seed: int, data: Data, folder: Path) -> list[nn.Module]:
    """Return the parts of the trained network, from its file if it exists."""
    torch.manual_seed(seed)
    parts, place = parts_of(network), folder / f"{network}-{seed}.pt"
    model = nn.Sequential(*parts)
    if not place.is_file():
        train(model, data, EPOCHS, LR[network], seed)
        scores = {"validation": accuracy(model, data.validation), "test": accuracy(model, data.test)}
        torch.save({"weights": model.state_dict(), "scores": scores}, place)
    model.load_state_dict(torch.load(place, weights_only=True)["weights"])
    return parts


def dropped(parts: Sequence[nn.Module], order: Sequence[int], keep: float) -> set[int]:
    """Drop blocks in this order until the rest is within the budget, then restore those that fit."""
    sizes = sizes_of(parts)
    most, out = keep * sum(sizes), set[int]()

    def left(without: set[int]) -> int:
        return sum(size for k, size in enumerate(sizes) if k not in without)

    for k in order:
        if left(out) > most:
            out.add(k)
    for k in order:
        if k in out and left(out - {k}) <= most:
            out.remove(k)
    assert left(out) <= most
    return out


@torch.no_grad()
def most_alike(parts: Sequence[nn.Module], blocks: Sequence[int], data: Data) -> list[int]:
    """Sort blocks by the cosine similarity of input and output on 1,000 training images, the most similar first."""
    x, alike = data.train[0][:1000], {}
    for k, part in enumerate(parts):
        y = part.eval()(x)
        if k in blocks:
            alike[k] = float(F.cosine_similarity(x.flatten(1), y.flatten(1)).mean())
        x = y
    return sorted(blocks, key=lambda k: -alike[k])


def evenly_dropped(parts: Sequence[nn.Module], keep: float) -> set[int]:
    """Return the smallest set of evenly spaced blocks without which the rest is within the budget."""
    blocks, sizes = removable(parts), sizes_of(parts)
    for count in range(1, len(blocks)):
        out = {blocks[int((i + 0.5) * len(blocks) / count)] for i in range(count)}
        if sum(size for k, size in enumerate(sizes) if k not in out) <= keep * sum(sizes):
            return out
    raise ValueError(f"no evenly spaced blocks leave {keep} of the parameters")


def chosen(method: str, parts: Sequence[nn.Module], keep: float, seed: int, data: Data, learned: Runs) -> list[int]:
    """Return the parts that stay, for methods that choose them before fine-tuning."""
    blocks = removable(parts)
    if method == "random":
        out = dropped(parts, random.Random(seed).sample(blocks, len(blocks)), keep)
    elif method == "alike":
        out = dropped(parts, most_alike(parts, blocks, data), keep)
    elif method == "again":
        (found,) = [r for r in learned if r["seed"] == seed]
        return list(found["kept"])
    else:
        out = evenly_dropped(parts, keep)
    return [k for k in range(len(parts)) if k not in out]


def run(network: str, method: str, keep: float, seed: int, data: Data, folder: Path) -> dict[str, Any]:
    """Cut one network, fine-tune it, and measure it."""
    parts, start = trained(network, seed, data, folder), time.process_time()
    sizes, epochs, lr, how = sizes_of(parts), FINE_EPOCHS, FINE_LR[network], None
    torch.manual_seed(1000 + seed)
    if method == "learned":
        model = nn.Sequential(mc.MaskedStack(parts, fan_in=1, mask_init=0.01, seed=seed))
        how = mc.Blend(steps=int(LEARNING * steps_of(FINE_EPOCHS)), keep=keep)
    else:
        kept = chosen(method, parts, keep, seed, data, runs_of(read_runs(folder), network, "learned", keep))
        if method == "scratch":
            parts, epochs, lr = parts_of(network), EPOCHS + FINE_EPOCHS, LR[network]
        model = nn.Sequential(*(parts[k] for k in kept))
    train(model, data, epochs, lr, 1000 + seed, how)
    if method == "learned":
        kept = path(mc.wiring_of(model))
    return {
        "network": network,
        "method": method,
        "keep": keep,
        "seed": seed,
        "kept": kept,
        "part": sum(sizes[k] for k in kept) / sum(sizes),
        "validation": accuracy(model, data.validation),
        "test": accuracy(model, data.test),
        "seconds": round(time.process_time() - start, 1),
    }


def path(wiring: Sequence[Any]) -> list[int]:
    """Return the parts that reach the output if each reads one other: from the last back to the first."""
    kept = [len(wiring) - 1]
    while wiring[kept[0]]:
        kept.insert(0, wiring[kept[0]][0])
    return kept


def runs_of(runs: Runs, network: str, method: str, keep: float) -> Runs:
    """Return the runs of one row of a table."""
    return [r for r in runs if (r["network"], r["method"], r["keep"]) == (network, method, keep)]


def scores_of(runs: Runs, network: str, method: str, keep: float) -> dict[int, float]:
    """Return test accuracies by seed."""
    return {r["seed"]: r["test"] for r in runs_of(runs, network, method, keep)}


def table(runs: Runs, network: str) -> Table:
    """Return the test accuracy of each method at each budget, and by how much `learned` is better, paired by seed."""
    lines: list[tuple[str, ...]] = []
    for keep in (*KEEPS, None):
        scores = {method: mean_scores(runs, network, method, keep) for method in METHODS}
        for method, theirs in scores.items():
            if theirs:
                over = "" if method == "learned" else difference_by_seed(scores["learned"], theirs).text()
                found = [] if keep is None else runs_of(runs, network, method, keep)
                left = f"{100 * fmean(r['part'] for r in found):.0f} %" if found else ""
                name = "mean of all" if keep is None else f"{keep}"
                lines.append((name, method, f"{len(theirs)}", left, statistic(list(theirs.values())).text(), over))
    full = statistic(list(scores_of(runs, network, "full", 1.0).values())).text()
    head = ("keep", "blocks chosen", "n", "parameters left", "test accuracy, %", "learned is better by (95 % interval)")
    notes = (f"The trained network, with all its blocks and before fine-tuning: {full} %.",)
    return Table(f"{network}, 12 blocks", head, tuple(lines), notes)


def mean_scores(runs: Runs, network: str, method: str, keep: float | None) -> dict[int, float]:
    """Return test accuracies by seed; without `keep`, the means over all budgets."""
    by_keep = [scores_of(runs, network, method, each) for each in (KEEPS if keep is None else (keep,))]
    seeds = set.intersection(*map(set, by_keep))
    return {seed: fmean(scores[seed] for scores in by_keep) for seed in sorted(seeds)}


def draw(runs: Runs, place: Path) -> None:
    """Draw mean test accuracy against the share of parameters left, with a line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, network in zip(figure.subplots(1, len(NETWORKS)), NETWORKS, strict=True):
        for method in METHODS:
            rows = [runs_of(runs, network, method, keep) for keep in KEEPS]
            parts = [100 * fmean(r["part"] for r in row) for row in rows]
            scores = [statistic([r["test"] for r in row]) for row in rows]
            bars = [score.deviation or 0.0 for score in scores]
            width = 2.5 if method == "learned" else 1.2
            axes.errorbar(parts, [score.mean for score in scores], bars, label=method, marker="o", lw=width, capsize=3)
        axes.set(title=network, xlabel="parameters left, %", ylabel="test accuracy, %")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(place, dpi=110)


def read_runs(folder: Path) -> Runs:
    """Read all finished runs, and the scores of trained networks."""
    runs: Runs = []
    for place in sorted(folder.glob("runs-*.jsonl")):
        runs += [json.loads(line) for line in place.read_text().splitlines()]
    for place in sorted(folder.glob("*.pt")):
        network, seed = place.stem.split("-")
        scores = torch.load(place, weights_only=True)["scores"]
        runs.append({"network": network, "method": "full", "keep": 1.0, "seed": int(seed), **scores})
    return sorted(runs, key=lambda r: (r["network"], -r["keep"], r["method"], r["seed"]))


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, or collect results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="resnet, vit (default: both)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10 (default: data)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/remove_blocks"), help="the folder for runs and weights"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--keep", type=float, nargs="+", default=KEEPS)
    parser.add_argument("--collect", action="store_true", help=f"run nothing; write existing results to {RESULTS.name}")
    parser.add_argument("--figure", type=Path, help=f"run nothing; draw {RESULTS.name} to this place")
    parser.add_argument("--show", action="store_true", help=f"run nothing; print the tables of {RESULTS.name}")
    args = parser.parse_args(argv)
    if args.collect:
        lines = ",\n".join(map(json.dumps, read_runs(args.folder)))
        write_atomically(RESULTS, f"[\n{lines}\n]\n")
    if args.show:
        runs = json.loads(RESULTS.read_text())
        print("\n".join(table(runs, network).markdown() for network in NETWORKS))
    if args.figure:
        draw(json.loads(RESULTS.read_text()), args.figure)
    if not (args.collect or args.show or args.figure):
        torch.set_num_threads(1)
        args.folder.mkdir(parents=True, exist_ok=True)
        data = read_data(args.data)
        for network in args.networks:
            run_missing(network, args, data)


def run_missing(network: str, args: argparse.Namespace, data: Data) -> None:
    """Run everything for a network that is not yet in its file."""
    place = args.folder / f"runs-{network}.jsonl"
    for seed, keep, method in product(args.seeds, args.keep, args.methods):
        runs = [json.loads(line) for line in place.read_text().splitlines()] if place.is_file() else []
        if (method, keep, seed) in {(r["method"], r["keep"], r["seed"]) for r in runs}:
            continue
        found = run(network, method, keep, seed, data, args.folder)
        with place.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
