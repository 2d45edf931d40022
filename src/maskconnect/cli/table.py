"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import say
from maskconnect.errors import printable

if TYPE_CHECKING:
    from maskconnect.recipes import Recipe


def show_summary(summary: dict[str, Any], recipe: Recipe, out: Path) -> None:
    """Print the results of one run."""
    from maskconnect.recipes.naming import data_name
    from maskconnect.training.progress import duration

    test, best, parameters = summary["test"], summary["best"], summary["parameters"]
    rows = [
        ("data", data_name(recipe)),
        ("test accuracy, last epoch", f"{test['top1']:.2f} %   top-5 {test['top5']:.2f} %"),
        (f"best epoch (chosen on {best['chosen_on']})", f"{best['test']['top1']:.2f} %   epoch {best['epoch']}"),
    ]
    if summary["freeze"]:
        drawn, frozen = (summary["freeze"][key]["top1"] for key in ("drawn", "frozen"))
        rows.append(
            (f"at the freeze: {recipe.masks_in_training}, {recipe.frozen_to}", f"{drawn:.2f} %, {frozen:.2f} %")
        )
    if recipe.paper is not None and recipe.paper.accuracy is not None:
        rows.append((f"the paper ({recipe.paper.where})", f"{recipe.paper.accuracy:.2f} %"))
    rows.append(("parameters", f"{parameters['weights']:,}"))
    rows.append(("after pruning", pruned_text(parameters)))
    rows.append(("time", duration(summary["seconds"])))
    if summary["skipped"]:
        rows.append(("skipped batches", f"{summary['skipped']:,}"))
    print()
    show_table(("", ""), rows)
    print()
    say(f"run folder: {out}")


def pruned_text(parameters: dict[str, int]) -> str:
    """Say how many parameters pruning leaves."""
    saved = 100 * (1 - parameters["pruned"] / parameters["weights"])
    return f"{parameters['pruned']:,}" + (f" (-{saved:.1f} %)" if saved else " (nothing is unused)")


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table without lines; the columns in `right` are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(head), padding=(0, 2, 0, 0))
    for number, title in enumerate(head):
        table.add_column(printable(title), justify="right" if number in right else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(printable, row))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    with console.capture() as shown:
        console.print(table)
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))
