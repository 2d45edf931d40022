"""Does learning help if branches differ? The section "Where sources differ" of research/evidence.md.

Three layers of eight different branches (convolutions of several kinds, pooling, identity) and a reader at the end, all
reading K=2 branches of the layer before; the images, batches and schedule of `quick/cifar100` or `quick/cifar10`, with
half the epochs. A run takes about a minute. Every result is written at once to research/evidence/benchmarks; finished
runs are not repeated. At the end the tables are printed.

    python benchmarks/unequal_branches.py --data data --seeds 9 --jobs 2
    python benchmarks/unequal_branches.py cifar10 --data data --rows Fixed paper 'direction, blend$'
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core.learning import Learning
from maskconnect.core.lookup import masks_of
from maskconnect.experiments.grid import seeds_of
from maskconnect.experiments.layout import Table
from maskconnect.recipes import load
from maskconnect.report.differences import Row, write_differences
from maskconnect.training import images
from maskconnect.training.files import write_atomically
from maskconnect.training.options import Options, prepare
from maskconnect.training.predictions import predict
from maskconnect.training.statistics import difference_by_seed, statistic

RESULTS = Path(__file__).resolve().parent.parent / "research" / "evidence" / "benchmarks"
WIDTH, LAYERS, FAN_IN = 32, 3, 2
RATES = (0.1, 0.1, 0.01, 0.001)  # of the phases: learn, freeze, fine, finer
NAMES = ("3x3", "3x3 dilated", "1x1", "depthwise", "average", "maximum", "as it is", "mean of all")
BLEND = {"mask_lr": 3.0, "credit": "new", "blend": True}
DIRECTION = {**BLEND, "mask_lr": 0.03, "gradient": "direction"}
ROWS: dict[str, dict[str, Any]] = {
    "Fixed-Random, K=2": {"connectivity": "random"},
    "Fixed-Full": {"connectivity": "full"},
    "Fixed-Prev, K=1 (3x3 on 3x3)": {"connectivity": "prev"},
    "Learned, K=2, as in the paper": {"mask_lr": 0.3},
    "Learned, K=2, rate 3, cooled": {"mask_lr": 3.0, "cooled": True},
    "Learned, K=2, rate 3, blend": {"mask_lr": 3.0, "blend": True},
    "Learned, K=2, new, rate 3, cooled": {"mask_lr": 3.0, "credit": "new", "cooled": True},
    "Learned, K=2, new, rate 3, blend": BLEND,
    "Learned, K=2, new, rate 1, blend": {**BLEND, "mask_lr": 1.0},
    "Learned, K=2, new, rate 10, blend": {**BLEND, "mask_lr": 10.0},
    "Learned, K=2, new, direction, blend": DIRECTION,
    "Learned, K=2, new, direction, blend, even": {**DIRECTION, "uniform_floor": 0.1},
    "Learned, K=2, new, rate 3, blend, late": {**BLEND, "held": 2},  # masks are held for two epochs, uniform
    "Learned, K=2, new, rate 3, blend, long": {**BLEND, "epochs": (7, 1, 1, 1)},
    "Given: what direction, blend has learned": {"again": "Learned, K=2, new, direction, blend"},
}


Results = dict[str, dict[str, Any]]
"""The result of each seed of each row."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="?", choices=("cifar100", "cifar10"), default="cifar100")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", metavar="N", help="the first N seeds, or which: 4..8 (default: 9; with --show, all)")
    parser.add_argument("--rows", nargs="+", default=[""], help="regular expressions that select rows (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for results")
    parser.add_argument("--show", choices=TABLES, help="run nothing; print this table of existing results")
    parser.add_argument("--figure", type=Path, help="with --show: also draw differences from Fixed-Full to this file")
    args = parser.parse_args(argv)
    place = args.results / f"unequal_branches-{args.images}.json"
    found: Results = json.loads(place.read_text()) if place.is_file() else {}
    seeds = seeds_of(args.seeds or "9")
    wanted = [row for row in ROWS if any(re.search(words, row) for words in args.rows)]
    if args.show:
        chosen = {row: found[row] for row in wanted if row in found}
        if args.seeds:
            chosen = {row: {s: runs[s] for s in map(str, seeds) if s in runs} for row, runs in chosen.items()}
        print(TABLES[args.show](chosen).markdown())
        if args.figure:
            full, others = by_seed(chosen, "Fixed-Full", "test"), [row for row in chosen if row != "Fixed-Full"]
            rows = [Row(row, difference_by_seed(by_seed(chosen, row, "test"), full)) for row in others]
            write_differences(rows, "Fixed-Full", "test", args.figure)
        return
    missing = [(row, s) for s in seeds for row in wanted if str(s) not in found.get(row, {})]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        plans = ((row, seed, planned(row, seed, found)) for row, seed in missing)
        running = {
            pool.submit(train, f"quick/{args.images}", plan, seed, args.data): (row, seed)
            for row, seed, plan in plans
            if plan
        }
        for job in as_completed(running):
            row, seed = running[job]
            found.setdefault(row, {})[str(seed)] = job.result()
            write_atomically(place, json.dumps(found) + "\n")
            print(f"{row}, seed {seed}: {job.result()['test']:.2f} %", flush=True)
    for table in TABLES.values():
        print(table(found).markdown())


def branch(name: str) -> nn.Module:
    """Return one of the eight branches, with a batch norm and a ReLU."""
    conv = partial(nn.Conv2d, WIDTH, WIDTH, bias=False)
    what: dict[str, nn.Module] = {
        "3x3": conv(3, padding=1),
        "3x3 dilated": conv(3, padding=2, dilation=2),
        "1x1": conv(1),
        "depthwise": conv(3, padding=1, groups=WIDTH),
        "average": nn.AvgPool2d(3, 1, 1),
        "maximum": nn.MaxPool2d(3, 1, 1),
        "as it is": nn.Identity(),
        "mean of all": MeanOfAll(),
    }
    return nn.Sequential(what[name], nn.BatchNorm2d(WIDTH), nn.ReLU())


class MeanOfAll(nn.Module):
    """Replaces every pixel with the mean of the image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the means, in the shape of x."""
        return x.mean(dim=(2, 3), keepdim=True).expand_as(x)


def network(classes: int, seed: int, **options: Any) -> nn.Sequential:
    """Return a stem, the layers, and a reader."""
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
    reader = nn.Sequential(branch("3x3"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, classes))
    layers: list[list[nn.Module]] = [[branch(name) for name in NAMES] for _ in range(LAYERS)]
    layers.append([reader])
    return nn.Sequential(stem, mc.MaskedStack(layers, FAN_IN, seed=seed, **options))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a row is trained."""

    connectivity: str | list[Any] = "learned"
    again: str | None = None  # the row whose wiring of the same seed is trained from scratch
    credit: str = "whole"
    mask_lr: float = 0.0
    gradient: str = "plain"
    cooled: bool = False
    blend: bool = False
    uniform_floor: float = 0.0
    held: int = 0  # the number of epochs for which masks and temperature stay fixed at first
    epochs: tuple[int, ...] = (4, 4, 1, 1)

    def how(self, steps: int) -> Learning:
        """Return how masks learn over this number of steps."""
        if self.blend:
            return mc.Blend(steps=steps, gradient=self.gradient, credit=self.credit, uniform_floor=self.uniform_floor)
        return mc.Draw(steps=steps if self.cooled else None, gradient=self.gradient, credit=self.credit)


def planned(row: str, seed: int, found: Results) -> Plan | None:
    """Return how a row is trained; None if the wiring that it reuses is not known yet."""
    plan = Plan(**ROWS[row])
    if plan.again is None:
        return plan
    learned = found.get(plan.again, {}).get(str(seed))
    return learned and replace(plan, connectivity=learned["wiring"])


def train(name: str, plan: Plan, seed: int, data: Path) -> dict[str, Any]:
    """Train one network on the images and at the rates of a recipe; return the result."""
    recipe, how = load(name, [f"seed={seed}"]), Options(device="cpu", threads=1, data=data)
    machine = prepare(how)
    given = images.prepare(recipe, how, torch.device("cpu"))
    model = network(len(given.classes), seed, connectivity=plan.connectivity)
    (masks,) = masks_of(model)
    groups = mc.param_groups(model, lr=0.0, mask_lr=plan.mask_lr, weight_decay=recipe.training.weight_decay)
    optimizer = torch.optim.SGD(groups, momentum=recipe.training.momentum)
    first, held = 0, plan.held * len(given.train)
    mc.attach(optimizer, model, plan.how(plan.epochs[0] * len(given.train) - held))
    for phase, (epochs, lr) in enumerate(zip(plan.epochs, RATES, strict=True)):
        if phase == 1:
            mc.freeze(model)
        optimizer.param_groups[0]["lr"] = lr  # of the weights
        for step, (x, y) in enumerate(chain.from_iterable(map(given.train.epoch, range(first, first + epochs)))):
            if plan.mask_lr:
                optimizer.param_groups[1]["lr"] = plan.mask_lr if step >= held else 0.0
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step < held:
                masks.progress.zero_()
        first += epochs
    assert given.validation is not None
    parts = {"validation": given.validation, "test": given.test}
    scores = {name: predict(model, part, machine, lambda: None).scores().top1 for name, part in parts.items()}
    return {**scores, "wiring": mc.wiring_of(model)}


def accuracies(found: Results) -> Table:
    """Return accuracies, and differences from each fixed rule and from the paper's method, with intervals."""
    rows, lines = list(filter(found.get, ROWS)), []
    others = [row for row in rows if row.startswith("Fixed") or row.endswith("in the paper")]
    for row in rows:
        cells = [statistic(list(by_seed(found, row, part).values())).text() for part in ("validation", "test")]
        lines.append((row, f"{len(found[row])}", *cells, *(over(found, row, other) for other in others)))
    head = ("", "n", "validation accuracy, %", "test accuracy, %", *(f"over {row}" for row in others))
    notes = ("Accuracies are those of the last epoch. Differences are paired by seed; intervals are Student's.",)
    return Table("Branches that are not alike", head, tuple(lines), notes)


def over(found: Results, row: str, other: str) -> str:
    """Return by how much a row is better, paired by seed."""
    return difference_by_seed(by_seed(found, row, "test"), by_seed(found, other, "test")).text()


def by_seed(found: Results, row: str, part: str) -> dict[int, float]:
    """Return the accuracies of a row by seed."""
    return {int(seed): run[part] for seed, run in found.get(row, {}).items()}


def readers(found: Results) -> Table:
    """Return how many branches of the next layer read each kind, averaged over layers and seeds."""
    lines = []
    for row in filter(found.get, ROWS):
        read = [k for run in found[row].values() for layer in run["wiring"] for reads in layer for k in reads]
        lines.append((row, *(f"{read.count(k) / len(found[row]) / LAYERS:.1f}" for k in range(len(NAMES)))))
    return Table("How many read a branch of each kind", ("", *NAMES), tuple(lines), ("A mean over layers and seeds.",))


def luck(found: Results) -> Table:
    """Return the test accuracy of the best of several random wirings, chosen on validation images."""
    runs = [(run["validation"], run["test"]) for run in found["Fixed-Random, K=2"].values()]
    counts = range(1, min(6, len(runs)) + 1)
    means = [fmean(max(some, key=lambda run: run[0])[1] for some in combinations(runs, count)) for count in counts]
    learned = statistic(list(by_seed(found, "Learned, K=2, new, direction, blend", "test").values()))
    head = ("random wirings that are trained", *map(str, counts), "one learned")
    rows = (("test accuracy of the best, %", *(f"{mean:.2f}" for mean in means), f"{learned.mean:.2f}"),)
    notes = (f"The mean over all ways to choose this number of the {len(runs)} seeds.",)
    return Table("The best of several random wirings", head, rows, notes)


TABLES = {"accuracies": accuracies, "readers": readers, "luck": luck}


if __name__ == "__main__":
    main()
