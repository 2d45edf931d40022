"""`maskconnect demo`: learn a wiring of different branches, compare it with fixed wirings, and prune it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.architecture import show_architecture
from maskconnect.cli.table import show_table
from maskconnect.cli.train import program
from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maskconnect.experiments.grid import Cell
    from maskconnect.experiments.sweep import Outcome
    from maskconnect.training.statistics import Difference, Statistic

ROWS = {
    "discover/mnist5k": "Learned, K=2",
    "discover/mnist5k-prev": "Fixed-Prev: a chain of 3x3",
    "discover/mnist5k-random": "Fixed-Random, K=2",
    "discover/mnist5k-full": "Fixed-Full: reading everything",
}
INTRODUCTION = """\
Three layers with nine kinds of branches each: several convolutions, pooling, identity, ... Which ones should be used,
and how should they be connected? This trains learned wiring and three fixed rules on the same 4,000 images of MNIST,
for the same number of epochs, with the same seeds."""


EXAMPLES = """demo
  maskconnect demo --seeds 12 --out runs/demo12

Running the same command again resumes: finished runs are not repeated. A larger --seeds adds runs."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `demo` to the command line."""
    about = "learn a wiring of different branches, and compare it with fixed ones (about 3 minutes)"
    parser = add_verb(commands, "demo", run, about, EXAMPLES)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="the folder for all runs (default: runs/demo)",
    )
    parser.add_argument("--seeds", type=int, default=6, metavar="N", help="seeds per wiring (default: 6)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one per core, at most 4)")


def run(args: argparse.Namespace) -> int:
    """Train what is missing, compare, prune."""
    from maskconnect.experiments.engine import Local
    from maskconnect.experiments.grid import Cell, folder_name
    from maskconnect.experiments.sweep import run_cells
    from maskconnect.recipes import load
    from maskconnect.training.progress import usual
    from maskconnect.training.stop import Stopped

    for name in ("seeds", "jobs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be 1 or more.")
    cells = [
        Cell(
            name=folder_name(f"{name.rpartition('/')[2]}-seed{seed}"),
            source=name,
            settings=(),
            values=(name,),
            recipe=replace(load(name), seed=seed),
        )
        for seed in range(args.seeds)
        for name in ROWS
    ]
    print(f"{INTRODUCTION}\n", flush=True)
    engine = Local(args.jobs or min(4, os.cpu_count() or 1), ["--threads", "1", "--channels-last"])
    try:
        outcomes = run_cells(cells, args.out, {"demo": list(ROWS)}, engine=engine, show=usual())
    except Stopped as stopped:
        print(f"stopped by {stopped}; progress is saved. Run the same command again to resume.", flush=True)
        return stopped.exit_code
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        say(f"FAILED {outcome.cell.name}: {outcome.why}")
    if failed:
        return 1
    show_comparison(outcomes)
    show_architecture(args.out / cells[0].name, code=False)
    show_next(args.out, cells[0])
    return 0


def show_comparison(outcomes: list[Outcome]) -> None:
    """Print the table, and which differences are significant."""
    from maskconnect.training.statistics import difference_by_seed, statistic

    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in ROWS}
    for outcome in outcomes:
        assert outcome.summary is not None
        found[outcome.cell.source][outcome.cell.recipe.seed] = outcome.summary
    scores = {name: {seed: s["test"]["top1"] for seed, s in runs.items()} for name, runs in found.items()}
    means = {name: statistic(list(by_seed.values())) for name, by_seed in scores.items()}
    learned, *fixed = ROWS
    over = {name: difference_by_seed(scores[learned], scores[name]) for name in fixed}
    head, rows = ("wiring", "test accuracy, %", "after pruning", "Learned is better by"), []
    for name, title in ROWS.items():
        left = statistic([s["parameters"]["pruned"] for s in found[name].values()]).mean
        difference = (over[name].text() or f"{over[name].mean:+.2f}") if name in over else ""
        rows.append((title, means[name].text(), f"{left:,.0f} parameters", difference))
    print()
    show_table(head, rows, right=range(1, len(head)))
    count = len(scores[learned])
    if count == 1:
        print("\n1,000 test images, last epoch. One seed shows how it works, but not which wiring is better.")
        return
    print(f"\n1,000 test images, last epoch; mean of {count} seeds ± deviation, and differences with 95 % intervals.")
    print(conclusion(over, means))


def conclusion(over: Mapping[str, Difference], means: Mapping[str, Statistic]) -> str:
    """Return which fixed rules learned wiring beats, which beat it, which do not differ, and who is first."""
    kinds: dict[str, list[str]] = {}
    for name, difference in over.items():
        clear = "better than" if difference.mean > 0 else "worse than"
        words = clear if difference.significant else "not significantly different from"
        kinds.setdefault(words, []).append(short(name))
    verdicts = [f"{words} {', '.join(names)}" for words, names in kinds.items()]
    first = short(max(means, key=lambda name: means[name].mean))
    return f"With these seeds, learned wiring is {'; '.join(verdicts)}. The highest mean: {first}."


def short(name: str) -> str:
    """Return the title of a row without its explanation."""
    return re.split("[:,]", ROWS[name])[0]


def show_next(out: Path, cell: Cell) -> None:
    """Print what to type next."""
    place, learned = shlex.quote(str(out)), shlex.quote(str(out / cell.name))
    print("\nNext:")
    for words in (
        f"report {place} --out report",
        f"prune {learned} --out slim",
        f"train {shlex.quote(cell.source)} --out {learned}   # shows this run, with the code of its pruned network",
        "recipes",
    ):
        print(f"  {program()} {words}")
