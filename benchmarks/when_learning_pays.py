"""Does learning beat random wiring? By the number of candidates, and by how different they are: research/when.md.

S sources see a digit of scikit-learn (8x8 pixels). One or four readers each read the mean of K=2 sources; the output
is the mean of the readers. Sources are of one of four kinds:

    equal          each sees the whole image; they differ only in their initial weights
    noisy copies   each sees the whole image with its own noise, of its own strength (0 to 2 deviations)
    patches        each sees 3x3 pixels at its own position
    unlike         each sees its own window, from a pixel to the whole image

A run takes 200 steps, about a second on one core. Every result is written to research/evidence/benchmarks; finished
runs are not repeated. At the end a table is printed.

    python benchmarks/when_learning_pays.py --seeds 20
    python benchmarks/when_learning_pays.py --seeds 100..104 --wirings learned --rates 0.01 0.03 0.1
    python benchmarks/when_learning_pays.py --candidates 16 --wirings learned --ways decay rms rms-decay
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.errors import need
from maskconnect.experiments.grid import seeds_of
from maskconnect.experiments.layout import Table
from maskconnect.report.figures import COLORS, FAINT, SOFT, STYLE, save
from maskconnect.training.files import write_atomically
from maskconnect.training.statistics import Difference, difference_by_seed, statistic

RESULTS = Path(__file__).resolve().parent.parent / "research" / "evidence" / "benchmarks"
READERS, CANDIDATES, KINDS = (1, 4), (4, 8, 16, 64), ("equal", "noisy copies", "patches", "unlike")
WIRINGS = ("random", "learned", "full")
RATE = 0.03
"""The recommended rate of the masks; a third of it and three times it do as well on validation (`--show rates`)."""
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "decay": {"decay": True},
    "rms": {"gradient": "rms"},
    "rms-decay": {"gradient": "rms", "decay": True},
}
"""Options of `mc.Blend`, by name."""
SIDE, PATCH, FAN_IN, WIDTH, MOST_NOISE = 8, 3, 2, 16, 2.0
LEARN, REST, LAST, LR, BATCH = 100, 100, 40, 0.1, 64
"""Steps with learned masks and with frozen ones; the last steps have a tenth of the learning rate."""
TRAIN, VALIDATION = 797, 300  # images; the other 700 are for testing

TITLE = "Learning pays among noisy copies and unlike sources, not among equal ones or patches"

Results = dict[str, dict[str, dict[str, Any]]]
"""The result of each seed of each case, by the name of the case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network to train."""

    readers: int
    kind: str
    candidates: int
    wiring: str
    rate: float | None = None  # of the masks, if they are learned
    way: str = ""  # a name in WAYS

    @property
    def name(self) -> str:
        """The key of its results."""
        rate = "" if self.rate is None else f" at rate {self.rate:g}"
        way = f", {self.way}" if self.way else ""
        return f"{self.kind}, S={self.candidates}, readers={self.readers}, {self.wiring}{rate}{way}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="20", metavar="N", help="the first N seeds, or which: 4..8 (default: 20)")
    parser.add_argument("--readers", type=int, nargs="+", default=READERS, help="number of readers (default: 1 and 4)")
    parser.add_argument("--candidates", type=int, nargs="+", default=CANDIDATES, help="S (default: 4 8 16 64)")
    parser.add_argument("--wirings", nargs="+", choices=WIRINGS, default=WIRINGS, help="default: all")
    parser.add_argument("--rates", type=float, nargs="+", default=[RATE], help=f"mask learning rates (default: {RATE})")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[""], help="options of learning (default: none)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for results")
    parser.add_argument("--show", choices=TABLES, help="run nothing; print this table of existing results")
    parser.add_argument("--figure", type=Path, help="with --show: also draw learned over random to this file")
    args = parser.parse_args(argv)
    place = args.results / "when_learning_pays.json"
    found: Results = json.loads(place.read_text()) if place.is_file() else {}
    seeds = seeds_of(args.seeds)
    if args.show:
        chosen = {name: {s: runs[s] for s in map(str, seeds) if s in runs} for name, runs in found.items()}
        print(TABLES[args.show](chosen).markdown())
        if args.figure:
            draw(chosen, args.figure)
        return
    wanted = cases(args.readers, args.candidates, args.wirings, args.rates, args.ways)
    missing = [(case, s) for s, case in product(seeds, wanted) if str(s) not in found.get(case.name, {})]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(train, case, seed): (case, seed) for case, seed in missing}
        for job in as_completed(running):
            case, seed = running[job]
            found.setdefault(case.name, {})[str(seed)] = job.result()
            write_atomically(place, json.dumps(found) + "\n")
            print(f"{case.name}, seed {seed}: {job.result()['validation']:.2f} % of validation images", flush=True)
    print(accuracies(found).markdown())


def cases(
    readers: Sequence[int],
    candidates: Sequence[int],
    wirings: Sequence[str],
    rates: Sequence[float],
    ways: Sequence[str] = ("",),
) -> list[Case]:
    """Return all combinations; only learned wiring has a rate and a way."""
    return [
        Case(readers=count, kind=kind, candidates=size, wiring=wiring, rate=rate, way=way)
        for count, kind, size, wiring in product(readers, KINDS, candidates, wirings)
        for rate, way in (product(rates, ways) if wiring == "learned" else ((None, ""),))
    ]


class View(nn.Module):
    """The view of one source: a window of the images, with noise."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()
        strength = torch.rand((), generator=generator).item()
        sizes = torch.randint(1, SIDE + 1, (2,), generator=generator).tolist()
        if kind == "patches":
            sizes = [PATCH, PATCH]
        starts = [int(torch.randint(SIDE - size + 1, (), generator=generator)) for size in sizes]
        if kind in ("equal", "noisy copies"):
            sizes, starts = [SIDE, SIDE], [0, 0]
        self.rows, self.columns = (slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        self.pixels = sizes[0] * sizes[1]
        self.noise = MOST_NOISE * strength if kind == "noisy copies" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the pixels of every image in a row."""
        seen = x[:, self.rows, self.columns].flatten(1)
        return seen + self.noise * torch.randn_like(seen) if self.noise else seen


def views(kind: str, candidates: int, seed: int) -> list[View]:
    """Return the view of each source; more candidates add views, and all wirings of a seed have the same views."""
    generator = torch.Generator().manual_seed(
        1_000_000 + seed
    )  # random wiring has another seed, so that it does not depend on the views
    return [View(kind, generator) for _ in range(candidates)]


def reader() -> nn.Module:
    """Return one reader; the batch norm gives the mean of many sources the scale of that of two."""
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def network(case: Case, seed: int) -> mc.MaskedStack:
    """Return sources and readers; the output is the mean of the readers."""
    torch.manual_seed(seed)
    readers = [reader() for _ in range(case.readers)]
    seen = views(case.kind, case.candidates, seed)
    sources = [nn.Sequential(view, nn.Linear(view.pixels, WIDTH), nn.ReLU()) for view in seen]
    layers: list[list[nn.Module]] = [[*sources], readers]
    return mc.MaskedStack(layers, FAN_IN, connectivity=case.wiring, seed=seed)


def digits() -> tuple[list[Tensor], list[Tensor]]:
    """Return images and labels for training, validation and testing; the same for all seeds."""
    found = need("sklearn.datasets", extra="data").load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(found.images, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    images = (images - images[:TRAIN].mean()) / images[:TRAIN].std()
    ends = [TRAIN, TRAIN + VALIDATION]
    return list(images.tensor_split(ends)), list(labels.tensor_split(ends))


def train(case: Case, seed: int, steps: tuple[int, int, int] = (LEARN, REST, LAST)) -> dict[str, Any]:
    """Train one network; return the result."""
    torch.set_num_threads(1)
    images, labels = digits()
    model, (learn, rest, last) = network(case, seed), steps
    groups = mc.param_groups(model, lr=LR, mask_lr=case.rate or 0.0, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=True)
    if case.wiring == "learned":
        mc.attach(optimizer, model, mc.Blend(steps=learn, **WAYS[case.way]))
    generator = torch.Generator().manual_seed(2_000_000 + seed)  # of the batches
    for step in range(learn + rest):
        if step == learn:
            mc.freeze(model)
        if step == learn + rest - last:
            optimizer.param_groups[0]["lr"] = LR / 10
        batch = torch.randint(TRAIN, (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[0][batch]), labels[0][batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(dim=1) == y).float().mean().item() for x, y in zip(images, labels, strict=True)]
    reads = {} if case.wiring == "full" else {"wiring": mc.wiring_of(model)[1]}
    return {"validation": round(100 * right[1], 4), "test": round(100 * right[2], 4), **reads}


def by_seed(found: Results, name: str, part: str) -> dict[int, float]:
    """Return the accuracies of a case by seed."""
    return {int(seed): run[part] for seed, run in found.get(name, {}).items()}


def learned_over(found: Results, other: str, readers: int, kind: str, candidates: int) -> Difference:
    """Return the difference of test accuracy, learned over another wiring, paired by seed."""
    ours = Case(readers=readers, kind=kind, candidates=candidates, wiring="learned", rate=RATE)
    theirs = Case(readers=readers, kind=kind, candidates=candidates, wiring=other)
    return difference_by_seed(by_seed(found, ours.name, "test"), by_seed(found, theirs.name, "test"))


def over(other: str, found: Results) -> Table:
    """Return a table of learned over another wiring, by S."""
    rows = []
    for readers, kind in product(READERS, KINDS):
        pairs = [learned_over(found, other, readers, kind, size) for size in CANDIDATES]
        rows.append((kind, f"{readers}", f"{max(pair.count for pair in pairs)}", *(pair.text() for pair in pairs)))
    head = ("sources", "readers", "n", *(f"S = {size}" for size in CANDIDATES))
    notes = ("Differences are paired by seed; intervals are Student's.",)
    return Table(f"Points of test accuracy, learned over {other}", head, tuple(rows), notes)


def over_random(found: Results) -> Table:
    """Return the numbers of the figure."""
    return over("random", found)


def over_full(found: Results) -> Table:
    """Return a table of learned over reading everything."""
    return over("full", found)


def accuracies(found: Results) -> Table:
    """Return the test accuracy of every case."""
    rows = []
    for readers, kind, wiring in product(READERS, KINDS, WIRINGS):
        rate = RATE if wiring == "learned" else None
        names = [Case(readers=readers, kind=kind, candidates=s, wiring=wiring, rate=rate).name for s in CANDIDATES]
        values = [list(by_seed(found, name, "test").values()) for name in names]
        rows.append((kind, f"{readers}", wiring, *(statistic(some).text() if some else "" for some in values)))
    head = ("sources", "readers", "wiring", *(f"S = {size}" for size in CANDIDATES))
    return Table("Test accuracy, %", head, tuple(rows), ("Mean and standard deviation over seeds.",))


def rates(found: Results) -> Table:
    """Return validation accuracy by mask rate: the mean over S and seeds."""
    rows = []
    known = [name.split(" at rate ")[1] for name in found if " at rate " in name]
    for rate in sorted({float(text) for text in known if "," not in text}):
        cells = []
        for readers, kind in product(READERS, KINDS):
            names = [case.name for case in cases([readers], CANDIDATES, ["learned"], [rate]) if case.kind == kind]
            values = [value for name in names for value in by_seed(found, name, "validation").values()]
            cells.append(statistic(values).mean if values else float("nan"))
        rows.append((f"{rate:g}", *(f"{cell:.2f}" for cell in cells), f"{sum(cells) / len(cells):.2f}"))
    heads = [f"{kind}, {_readers(readers)}" for readers, kind in product(READERS, KINDS)]
    return Table("Validation accuracy, %, by mask rate", ("mask rate", *heads, "mean"), tuple(rows), ())


def ways(found: Results) -> Table:
    """Return a table of each way to learn over the default, with 16 candidates."""
    rows = []
    for readers, kind in product(READERS, KINDS):
        case = Case(readers=readers, kind=kind, candidates=16, wiring="learned", rate=RATE)
        default, *others = [by_seed(found, replace(case, way=way).name, "test") for way in WAYS]
        pairs = [difference_by_seed(other, default) for other in others]
        rows.append((kind, f"{readers}", f"{pairs[0].count}", *(pair.text() for pair in pairs)))
    head = ("sources", "readers", "n", *(way for way in WAYS if way))
    notes = ("Differences are paired by seed; intervals are Student's.",)
    return Table("Points of test accuracy, S = 16, over the default", head, tuple(rows), notes)


def _readers(count: int) -> str:
    return "one reader" if count == 1 else f"{count} readers"


def reads(found: Results) -> Table:
    """Return the mean noise of the sources of one reader, or the mean number of pixels that they see."""
    rows = []
    for kind, what in (("noisy copies", "noise"), ("unlike", "pixels")):
        for label, wiring in (("random", "random"), ("learned", "learned"), ("the best two", "")):
            cells = [_seen(found, kind, what, wiring, size) for size in CANDIDATES]
            rows.append((f"{kind}: {what}", label, *(f"{cell:.2f}" for cell in cells)))
    head = ("sources", "read", *(f"S = {size}" for size in CANDIDATES))
    notes = ("Noise is in standard deviations of a pixel; the best have the least noise, or see the most pixels.",)
    return Table("What one reader reads", head, tuple(rows), notes)


def _seen(found: Results, kind: str, what: str, wiring: str, candidates: int) -> float:
    """Return the mean over seeds and sources; without a wiring, of the best two."""
    rate = None if wiring == "random" else RATE
    case = Case(readers=1, kind=kind, candidates=candidates, wiring=wiring or "learned", rate=rate)
    values: list[float] = []
    for seed, run in found.get(case.name, {}).items():
        every = [float(getattr(view, what)) for view in views(kind, candidates, int(seed))]
        best = sorted(every, reverse=what == "pixels")[:FAN_IN]
        values += [every[k] for k in run["wiring"][0]] if wiring else best
    return statistic(values).mean if values else float("nan")


def draw(found: Results, place: Path) -> None:
    """Draw learned over random, with a panel per number of readers; `place` has no suffix."""
    mpl = need("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    look = {**STYLE, "axes.titlesize": 9, "axes.titlepad": 6}
    with mpl.rc_context(look):
        figure = Figure(figsize=(7.6, 3.5), layout="constrained")
        panels = figure.subplots(1, len(READERS), sharey=True)
        for axes, readers in zip(panels, READERS, strict=True):
            axes.axhline(0, color=FAINT, linewidth=1.2)
            for number, kind in enumerate(reversed(KINDS)):
                pairs = [learned_over(found, "random", readers, kind, size) for size in CANDIDATES]
                known = [(size * 1.06 ** (number - 1.5), pair) for size, pair in zip(CANDIDATES, pairs, strict=True)]
                points = [(x, pair.mean, pair.interval) for x, pair in known if pair.interval is not None]
                ends = [[mean - low for _, mean, (low, _) in points], [high - mean for _, mean, (_, high) in points]]
                x, y = [point[0] for point in points], [point[1] for point in points]
                axes.errorbar(x, y, yerr=ends, color=COLORS[number], marker="o", markersize=4, capsize=2.5, label=kind)
            axes.set_xscale("log", base=2)
            axes.set_xticks(CANDIDATES, map(str, CANDIDATES))
            axes.minorticks_off()
            axes.set(title=_readers(readers))
            axes.set_xlabel(f"candidates per target (K = {FAN_IN})")
        panels[0].set_ylabel("points of test accuracy,\nlearned over random")
        panels[-1].legend(
            title="sources are", alignment="left", loc="upper right", frameon=True, edgecolor="white", framealpha=1
        )
        figure.suptitle(TITLE, x=0.01, ha="left", fontsize=10, fontweight="bold")
        count = max(len(runs) for name, runs in found.items() if name.endswith("random"))
        note = f"scikit-learn's digits; the mean of {count} pairs of equal seeds, and its interval of 95 %"
        figure.supxlabel(note, fontsize=7.5, color=SOFT, x=0.01, ha="left")
        save(figure, place)


TABLES = {
    "random": over_random,
    "full": over_full,
    "accuracies": accuracies,
    "rates": rates,
    "ways": ways,
    "reads": reads,
}


if __name__ == "__main__":
    main()
