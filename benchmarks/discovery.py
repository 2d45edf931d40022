"""Different branches: learned wiring compared with alternatives. The tables of research/discovery.md.

Every row is a network of `discover/*`, trained on the same images, in the same order, for the same number of steps. A
run of a quick recipe takes about a minute on one core. Every result is written at once to research/evidence/benchmarks;
finished runs are not repeated. At the end the table is printed.

    python benchmarks/discovery.py discover/cifar10-quick --data data --seeds 9 --jobs 2
    python benchmarks/discovery.py discover/fashion-quick --data data --rows Learned Fixed
    python benchmarks/discovery.py discover/cifar10-quick --show
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from maskconnect.experiments.grid import seeds_of
from maskconnect.experiments.layout import Table
from maskconnect.training.files import write_atomically
from maskconnect.training.options import Options
from maskconnect.training.statistics import difference_by_seed, statistic

RESULTS = Path(__file__).resolve().parent.parent / "research" / "evidence" / "benchmarks"

Results = dict[str, dict[str, Any]]
"""The result of each seed of each row."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe of discover/*, without its variant")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", default="9", help="the first N seeds, or which: 4..8 (default: 9)")
    parser.add_argument("--rows", nargs="+", default=[""], help="regular expressions that select rows (default: all)")
    parser.add_argument("--tried", action="store_true", help="also run controls, and settings that were tried")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="change the recipe")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for results")
    parser.add_argument("--show", action="store_true", help="run nothing; print the table of existing results")
    args = parser.parse_args(argv)
    place = args.results / f"{args.recipe.replace('/', '-')}.json"
    seeds = seeds_of(args.seeds)
    if args.set and args.results == RESULTS and not args.show:
        parser.error("--set changes the recipe; pass --results, a folder of its own, too")
    if not args.show:
        run_missing(args, place, seeds)
    found: Results = json.loads(place.read_text())
    shown = {
        row: {seed: run for seed, run in runs.items() if int(seed) in seeds}
        for row, runs in found.items()
        if any(re.search(words, row) for words in args.rows)
    }
    print(accuracies({row: runs for row, runs in shown.items() if runs}).markdown())


def run_missing(args: argparse.Namespace, place: Path, seeds: Sequence[int]) -> None:
    """Train what has no result yet."""
    from discovery_runs import ROWS, TRIED

    known = ROWS | TRIED if args.tried else ROWS
    wanted = [row for row in known if any(re.search(words, row) for words in args.rows)]
    found: Results = json.loads(place.read_text()) if place.is_file() else {}
    missing = [(row, seed) for seed in seeds for row in wanted if str(seed) not in found.get(row, {})]
    work = {(row, seed): (args.recipe, tuple(args.set), known[row]) for row, seed in missing}
    train_all(work, found, place, data=args.data, jobs=args.jobs, order=[*ROWS, *TRIED])


def train_all(
    work: Mapping[tuple[str, int], tuple[str, tuple[str, ...], Any]],
    found: Results,
    place: Path,
    *,
    data: Path,
    jobs: int,
    order: Sequence[str] = (),
) -> None:
    """Train a network per row and seed, from a recipe, its settings and a `Row`; write each result at once."""
    from discovery_runs import train

    how = Options(device="cpu", threads=1, data=data, channels_last=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {
            pool.submit(train, recipe, settings, kind, seed, how): (row, seed)
            for (row, seed), (recipe, settings, kind) in work.items()
        }
        for job in as_completed(running):
            row, seed = running[job]
            found.setdefault(row, {})[str(seed)] = job.result()
            place.parent.mkdir(parents=True, exist_ok=True)
            ordered = {name: found[name] for name in dict.fromkeys([*order, *found]) if name in found}
            write_atomically(place, json.dumps(ordered) + "\n")
            print(f"{row}, seed {seed}: {job.result()['test']:.2f} %", flush=True)


def accuracies(found: Results) -> Table:
    """Return accuracies, the difference of the first row from each of the others, and parameters after pruning."""
    first, lines = next(iter(found)), []
    for row, runs in found.items():
        cells = [summary(by_seed(found, row, part)) for part in ("validation", "test")]
        over = difference_by_seed(by_seed(found, first, "test"), by_seed(found, row, "test"))
        seconds = median(run["seconds"] for run in runs.values())
        left = fmean(run["parameters"] for run in runs.values())
        difference = over.text() if row != first else ""
        lines.append((row, f"{len(runs)}", *cells, difference, f"{left:,.0f}", f"{seconds:.0f}"))
        if row == "Fixed-Random":
            lines += [best_of(found, row, count) for count in (4, 8) if count <= len(by_seed(found, row, "validation"))]
    accuracy = ("validation accuracy, %", "test accuracy, %")
    head = ("", "n", *accuracy, f"{first} is better by", "parameters after pruning", "seconds")
    notes = ("Accuracies are those of the last epoch. Differences are paired by seed; intervals are Student's.",)
    return Table("Unlike branches", head, tuple(lines), notes)


def summary(accuracy: dict[int, float]) -> str:
    """Return mean and deviation; empty if a recipe has no such images."""
    return statistic(list(accuracy.values())).text() if accuracy else ""


def best_of(found: Results, row: str, count: int) -> tuple[str, ...]:
    """Return the best of `count` random wirings by validation accuracy, averaged over all ways to choose them."""
    runs = [(run["validation"], run["test"], run["seconds"]) for run in found[row].values()]
    best = [max(some, key=lambda run: run[0]) for some in combinations(runs, count)]
    validation, test = (f"{fmean(run[part] for run in best):.2f}" for part in (0, 1))
    return f"the best of {count}", "", validation, test, "", "", f"{count * median(run[2] for run in runs):.0f}"


def by_seed(found: Results, row: str, part: str) -> dict[int, float]:
    """Return the accuracies of a row by seed."""
    return {int(seed): run[part] for seed, run in found.get(row, {}).items() if part in run}


if __name__ == "__main__":
    main()
