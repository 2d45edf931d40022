"""A figure of what `maskconnect compare` finds: the difference of every pair, their mean, and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import need
from maskconnect.report.figures import COLOURS, FAINT, INK, SOFT, STYLE, save
from maskconnect.training.statistics import Difference

BETTER, WORSE = COLOURS[:2]


@dataclass(frozen=True)
class Row:
    """One thing beside the baseline."""

    label: str
    found: Difference

    @property
    def colour(self) -> str:
        """By what the interval shows."""
        low, high = self.found.interval or (-1.0, 1.0)
        return BETTER if low > 0 else WORSE if high < 0 else INK


def write_differences(rows: Sequence[Row], baseline: str, on: str, place: Path) -> list[Path]:
    """A line a row, the first on top; `place` has no suffix."""
    mpl = need("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    labels = [f"{row.label}  (n={row.found.count})" for row in rows]
    look: dict[str, Any] = {**STYLE, "axes.grid.axis": "x", "ytick.color": INK}
    with mpl.rc_context(look):
        width = 4.6 + 0.07 * max(map(len, labels))
        figure = Figure(figsize=(width, 1.2 + 0.27 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=FAINT, linewidth=1.2)
        for y, row in enumerate(rows):
            axes.plot(row.found.pairs, [y] * row.found.count, "|", color=FAINT, markersize=9, markeredgewidth=1)
            if row.found.interval is not None:
                axes.plot(row.found.interval, [y, y], color=row.colour, linewidth=2.2, solid_capstyle="butt")
                axes.plot(row.found.mean, y, "o", color=row.colour, markersize=5.5)
        axes.set_yticks(range(len(rows)), labels)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=_limits(rows))
        title = f"Points of {on} accuracy over {baseline}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        note = "stroke: a pair of equal seeds   bar: the mean and its interval of 95 %, which may go on beyond the edge"
        figure.supxlabel(note, fontsize=7.5, color=SOFT, x=0.01, ha="left")
        return save(figure, place)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Every pair is seen, and zero; an interval of few pairs can be so wide that nothing else would be."""
    pairs = [0.0, *(pair for row in rows for pair in row.found.pairs)]
    low, high = min(pairs), max(pairs)
    margin = 0.3 * (high - low) or 1.0
    return low - margin, high + margin
