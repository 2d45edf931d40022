"""Do accuracy and wiring suffer if mask gradients come from a sample of the images (`mc.Blend(images=16)`)?

Every recipe is trained with all images and with samples, with the same seeds. This prints the paired differences of
test accuracy, and the share of connections that are also in the wiring of the same seed with all images; for
comparison, the share that two wirings with all images and different seeds have in common.

    python benchmarks/images.py --data data --seeds 9 --jobs 2
    python benchmarks/images.py --show
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from discovery import Results, train_all

from maskconnect.experiments.grid import seeds_of
from maskconnect.experiments.layout import Table
from maskconnect.training.statistics import difference_by_seed, statistic

RESULT = Path(__file__).resolve().parent.parent / "research" / "evidence" / "benchmarks" / "images.json"
RECIPES = ("quick/cifar100-strong", "discover/cifar10-quick")
SAMPLES = {"all": "none", "16": "16", "8": "8"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=RECIPES, help="only this recipe (default: all)")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", default="9", help="the first N seeds, or which: 4..8 (default: 9)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULT, help="the file for results")
    parser.add_argument("--show", action="store_true", help="run nothing; print the tables of existing results")
    args = parser.parse_args(argv)
    found: Results = json.loads(args.results.read_text()) if args.results.is_file() else {}
    if not args.show:
        run_missing(args, found)
    seeds = {str(seed) for seed in seeds_of(args.seeds)}
    for recipe in recipes_of(args):
        rows = {images: found.get(f"{recipe}, {images}", {}) for images in SAMPLES}
        rows = {images: {s: run for s, run in runs.items() if s in seeds} for images, runs in rows.items()}
        if all(rows.values()):
            print(table(recipe, rows).markdown())


def recipes_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the recipe that is asked for, or all."""
    return (args.recipe,) if args.recipe else RECIPES


def run_missing(args: argparse.Namespace, found: Results) -> None:
    """Train what has no result yet."""
    from discovery_runs import Row

    work = {
        (name, seed): (recipe, (f"learning.images={value}",), Row())
        for seed in seeds_of(args.seeds)
        for recipe in recipes_of(args)
        for images, value in SAMPLES.items()
        if str(seed) not in found.get(name := f"{recipe}, {images}", {})
    }
    train_all(work, found, args.results, data=args.data, jobs=args.jobs)


def table(recipe: str, rows: dict[str, dict[str, Any]]) -> Table:
    """Return a table with a row per number of images."""
    accuracy = {name: {int(seed): run["test"] for seed, run in runs.items()} for name, runs in rows.items()}
    lines = []
    for name, runs in rows.items():
        lost = difference_by_seed(accuracy["all"], accuracy[name]).text() if name != "all" else ""
        same = f"{shared(rows['all'], runs):.0f}"
        lines.append((name, f"{len(runs)}", statistic(list(accuracy[name].values())).text(), lost, same))
    head = ("images", "n", "test accuracy, %", "all images are better by", "same connections, %")
    return Table(recipe, head, tuple(lines), ("Differences are paired by seed; intervals are Student's.",))


def shared(whole: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the share of connections that two wirings have in common: of one seed, or of different seeds of a row."""
    if whole is other:
        pairs = [(a["wiring"], b["wiring"]) for a, b in combinations(whole.values(), 2)]
    else:
        pairs = [(whole[seed]["wiring"], run["wiring"]) for seed, run in other.items() if seed in whole]
    both = [(set(connections(a)), set(connections(b))) for a, b in pairs]
    return 100 * fmean(len(a & b) / len(a) for a, b in both)


def connections(wiring: list[Any], target: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield every connection as the position of its target, and its source."""
    for number, row in enumerate(wiring):
        if isinstance(row, int):
            yield target, row
        else:
            yield from connections(row, (*target, number))


if __name__ == "__main__":
    main()
