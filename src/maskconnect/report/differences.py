"""The figure of `maskconnect compare`: the difference of every pair, their mean, and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import need
from maskconnect.report.figures import COLORS, FAINT, INK, SOFT, STYLE, save
from maskconnect.training.statistics import Difference

BETTER, WORSE = COLORS[:2]


@dataclass(frozen=True)
class Row:
    """One thing compared with the baseline."""

    label: str
    found: Difference

    @property
    def color(self) -> str:
        """Blue for better, orange for worse, black where there is no significant difference."""
        low, high = self.found.interval or (-1.0, 1.0)
        return BETTER if low > 0 else WORSE if high < 0 else INK


def write_differences(rows: Sequence[Row], baseline: str, on: str, place: Path) -> list[Path]:
    """Write one line per row, the first on top; `place` has no suffix."""
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
                axes.plot(row.found.interval, [y, y], color=row.color, linewidth=2.2, solid_capstyle="butt")
                axes.plot(row.found.mean, y, "o", color=row.color, markersize=5.5)
        axes.set_yticks(range(len(rows)), labels)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=_limits(rows))
        title = f"Points of {on} accuracy over {baseline}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        note = "stroke: a pair of equal seeds   bar: the mean and its 95 % interval, which may extend beyond the edge"
        figure.supxlabel(note, fontsize=7.5, color=SOFT, x=0.01, ha="left")
        return save(figure, place)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Limits that show every pair and zero; the interval of few pairs may be too wide to show whole."""
    pairs = [0.0, *(pair for row in rows for pair in row.found.pairs)]
    low, high = min(pairs), max(pairs)
    margin = 0.3 * (high - low) or 1.0
    return low - margin, high + margin
