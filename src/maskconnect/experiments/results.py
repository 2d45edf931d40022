"""The results of a sweep: a table of means over seeds, and a CSV file with every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from maskconnect.experiments.grid import Grid
from maskconnect.experiments.sweep import Outcome
from maskconnect.reading import read_text
from maskconnect.training.files import write_atomically
from maskconnect.training.progress import duration
from maskconnect.training.statistics import statistic

FILE = "results.csv"


def table(grid: Grid, outcomes: Sequence[Outcome]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table, with a row per combination of values."""
    fields = [field for field, _ in grid.over]
    head = (*fields, "seeds", "test accuracy, %", "after pruning", "time per run")
    rows: list[tuple[str, ...]] = []
    for values in dict.fromkeys(outcome.cell.values for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.cell.values == values]
        found = [outcome.summary for outcome in members if outcome.summary is not None]
        seeds = f"{len(found)}" + (f" of {len(members)}" if len(found) < len(members) else "")
        if not found:
            rows.append((*values, seeds, next(m.why for m in members), "", ""))
            continue
        accuracy = statistic([summary["test"]["top1"] for summary in found])
        pruned = statistic([summary["parameters"]["pruned"] for summary in found])
        seconds = statistic([summary["seconds"] for summary in found])
        rows.append((*values, seeds, accuracy.text(), f"{pruned.mean:,.0f}", duration(seconds.mean)))
    return head, rows


def _others(out: Path, head: list[str], now: set[str]) -> list[list[str]]:
    """Return the rows of earlier sweeps whose runs still exist."""
    try:
        first, *rows = list(csv.reader(read_text(out / FILE).splitlines()))
    except (OSError, ValueError):
        return []
    if first != head:
        return []
    return [row for row in rows if len(row) == len(head) and row[-2] not in now and (out / row[-2]).is_dir()]


def write_results(grid: Grid, outcomes: Sequence[Outcome], out: Path) -> Path:
    """Write every run as a line of a CSV file; keep those of earlier sweeps with other values or seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ("top1", "top5", "parameters", "pruned", "seconds")
    head = [*(field for field, _ in grid.over), "seed", *numbers, "folder", "failed"]
    writer.writerow(head)
    writer.writerows(_others(out, head, {outcome.folder.name for outcome in outcomes}))
    for outcome in outcomes:
        summary = outcome.summary
        found = [""] * len(numbers)
        if summary is not None:
            test, parameters = summary["test"], summary["parameters"]
            found = [test["top1"], test["top5"], parameters["weights"], parameters["pruned"], summary["seconds"]]
        writer.writerow([*outcome.cell.values, outcome.cell.recipe.seed, *found, outcome.folder.name, outcome.why])
    write_atomically(out / FILE, text.getvalue())
    return out / FILE
