"""A table of the paper with our numbers, in the layout of the paper, for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maskconnect.experiments.sweep import NOT_RUN, Outcome
from maskconnect.recipes.naming import data_names, network_name, wiring_name
from maskconnect.recipes.schema import Paper
from maskconnect.training.statistics import difference_by_seed, statistic

QUICK = "Quick scale: {}, fewer images, fewer epochs. It is not the paper's experiment."
NOTES = (
    "Accuracies are those of the last epoch, in %; the best of n seeds was chosen on the test set, as in the paper.",
    "Differences are paired by seed; intervals are Student's.",
)


@dataclass(frozen=True)
class Table:
    """Text in rows; the first row of each block has the name of the network."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    scale: str = "paper"
    data: str = ""  # the data set

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [f"**{self.title}**", "", _pipes(self.head), _pipes(["---"] * len(self.head))]
        return "\n".join([*lines, *map(_pipes, self.rows), "", *(f"- {note}" for note in self.notes), ""])

    def csv(self) -> str:
        """Return the table as CSV; every row has all its cells."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.head, "data", "scale"])
        name = ""
        for row in self.rows:
            name = row[0] or name
            writer.writerow([name, *row[1:], self.data, self.scale])
        return text.getvalue()

    def latex(self) -> str:
        """Return the table as LaTeX, with booktabs."""
        lines = [
            r"\begin{tabular}{ll" + "c" * (len(self.head) - 2) + "}",
            r"\toprule",
            _ampersands(self.head),
            r"\midrule",
        ]
        if self.scale != "paper":
            what = f"{self.data}, {self.scale} scale, not the paper's experiment"
            lines.append(rf"\multicolumn{{{len(self.head)}}}{{l}}{{\emph{{{what}}}}} \\")
        for number, row in enumerate(self.rows):
            lines += [r"\midrule"] * bool(number and row[0]) + [_ampersands(row)]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in self.notes), ""])


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _ampersands(cells: Sequence[str]) -> str:
    escaped: dict[str, str | int | None] = {letter: f"\\{letter}" for letter in "&%#_{}$"}
    escaped |= {"\\": r"\textbackslash{}", "±": r"$\pm$", "^": r"\^{}", "~": r"\~{}", "<": "$<$", ">": "$>$"}
    return " & ".join(_line(cell).translate(str.maketrans(escaped)) for cell in cells) + r" \\"


def table_of(title: str, outcomes: Sequence[Outcome], *, scale: str, compared: bool = True) -> Table:
    """Put our numbers next to the paper's: a row per recipe, a block per network, with the baseline first."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.cell.values, []).append(outcome)
    rows, baseline, before = [], {}, ""
    for members in groups.values():
        recipe = members[0].cell.recipe
        name, accuracy = network_name(recipe.model), _accuracies(members)
        if name != before:
            baseline = accuracy
        against = _against(accuracy, baseline) if name == before else "the baseline"
        rows.append((name if name != before else "", *_numbers(members, accuracy, against)))
        before = name
    head: tuple[str, ...] = (
        *("model", "connectivity", "ours: best (mean ± std)", "n", "paper"),
        *("parameters (paper)", "after pruning (paper)", "against the baseline, 95 % interval"),
    )
    failed = [
        _line(f"{o.cell.name} has no result: {o.why}") for o in outcomes if o.summary is None and o.why != NOT_RUN
    ]
    if missing := sum(o.summary is None and o.why == NOT_RUN for o in outcomes):
        failed.append(f"{missing} of {len(outcomes)} runs are missing.")
    if not compared:
        head, rows = head[:-1], [row[:-1] for row in rows]
    data = data_names(outcome.cell.recipe for outcome in outcomes)
    quick = (QUICK.format(data),) if scale == "quick" else ()
    return Table(title, head, tuple(rows), (*quick, *NOTES, *failed), scale, data)


def _accuracies(members: Sequence[Outcome]) -> dict[int, float]:
    return {o.cell.recipe.seed: o.summary["test"]["top1"] for o in members if o.summary is not None}


def _numbers(members: Sequence[Outcome], accuracy: dict[int, float], against: str) -> tuple[str, ...]:
    cell = members[0].cell
    found: list[dict[str, Any]] = [o.summary for o in members if o.summary is not None]
    count = f"{len(found)}" if len(found) == len(members) else f"{len(found)} of {len(members)}"
    paper = cell.recipe.paper
    ours = f"{max(accuracy.values()):.2f} ({statistic(list(accuracy.values())).text()})" if accuracy else "no result"
    sizes = [
        _millions([s["parameters"][key] for s in found], theirs)
        for key, theirs in zip(("weights", "pruned"), _sizes(paper), strict=True)
    ]
    return (cell.label or wiring_name(cell.recipe.model), ours, count, _paper(paper), *sizes, against)


def _sizes(paper: Paper | None) -> tuple[float | None, float | None]:
    return (None, None) if paper is None else (paper.parameters, paper.pruned)


def _millions(ours: Sequence[int], theirs: float | None) -> str:
    beside = "" if theirs is None else f" ({theirs:g})"
    return (f"{statistic(ours).mean / 1e6:.2f} M" if ours else "") + beside


def _line(text: str) -> str:
    """Put a text on one line."""
    return " ".join(text.split())


def _paper(paper: Paper | None) -> str:
    if paper is None or paper.accuracy is None:
        return ""
    spread = (
        "" if paper.mean is None else f" ({paper.mean:.2f}" + ("" if paper.std is None else f" ± {paper.std:.2f}") + ")"
    )
    return f"{paper.accuracy:.2f}{spread}"


def _against(ours: dict[int, float], theirs: dict[int, float]) -> str:
    difference = difference_by_seed(ours, theirs)
    if not difference.count:
        return "no pair of seeds"
    if difference.interval is None:
        return f"{difference.mean:+.2f} ({'one pair' if difference.count == 1 else difference.verdict})"
    return f"{difference.text()}: {difference.verdict}"
