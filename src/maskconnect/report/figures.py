"""Static figures for papers and slides, as SVG and PNG, with matplotlib: the charts and drawings of the page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.errors import need
from maskconnect.report.chart import Chart, Line
from maskconnect.report.drawing import HEAD, LABEL, MARGIN, Drawing, Panel, fading, opacity, thickness
from maskconnect.report.mistakes import FEW, Confusion, short
from maskconnect.report.plot import shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3508b", "#c98a00", "#3a9bd9", "#6e7781", "#8a5a2b")
DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.6)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1.5)),
    (0, (8, 1.5)),
    (0, (0.6, 1)),
    (0, (8, 1.5, 1.5, 1.5)),
)
INK, SOFT, FAINT, RULE, SHADE = "#1f2328", "#57606a", "#8c959f", "#d0d7de", "#f3f5f7"
PIXELS = 100
"""The pixels of a drawing per inch; PNG files have twice as many."""

MOST_PIXELS = 30_000
"""The limit for the longer side of a PNG: matplotlib fails above 65,536, and viewers earlier."""

STYLE: dict[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a class may be called $x$
    "svg.hashsalt": "maskconnect",  # the same figure gives the same file
}


def write_chart(chart: Chart, place: Path) -> list[Path]:
    """One chart; `place` has no suffix."""
    return write_charts([chart], place, columns=1, size=(4.8 + 1.9 * _crowded(chart), 3.1))


def write_charts(
    charts: Sequence[Chart], place: Path, *, columns: int = 3, size: tuple[float, float] = (4.0, 2.7)
) -> list[Path]:
    """Charts in rows and columns, each of `size` inches."""
    mpl = need("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        for number, chart in enumerate(charts):
            _chart(figure.add_subplot(rows, columns, number + 1), chart)
        if len(charts) == 1 and charts[0].note:
            figure.supxlabel(charts[0].note, fontsize=7, color=SOFT, x=0.01, ha="left")
        return save(figure, place)


def _chart(axes: Axes, chart: Chart) -> None:
    for number, band in enumerate(chart.bands):
        if number % 2 == 0:
            axes.axvspan(band.start, band.end, color=SHADE, linewidth=0, zorder=0)
        if band.end - band.start > 0.021 * len(band.name) * chart.bands[-1].end:
            middle = (band.start + band.end) / 2
            at: dict[str, Any] = {"xy": (middle, 1), "xycoords": axes.get_xaxis_transform(), "xytext": (0, 3)}
            axes.annotate(band.name, **at, textcoords="offset points", ha="center", fontsize=7, color=SOFT)
    for number, line in enumerate(chart.lines):
        _line(axes, line, chart.legend(line), *_look(chart, number))
    if chart.log and _steep(chart):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # the default uses mathematics, which STYLE turns off
        axes.yaxis.set_minor_formatter("")
    if chart.bands:
        axes.set_xlim(0, chart.bands[-1].end)
    if chart.most is not None and axes.get_ylim()[1] > chart.most:
        axes.set_ylim(top=chart.most)
    if axes.get_ylim()[0] < 0 <= min(y for line in chart.lines for y in line.y if y is not None):
        axes.set_ylim(bottom=0)  # no error bar extends below 0
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    if len(chart.lines) > 1 or chart.is_strip:
        aside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if _crowded(chart) else {}
        axes.legend(handlelength=2.4, **aside)


def _crowded(chart: Chart) -> bool:
    """Whether the legend needs a place beside the lines."""
    return len(chart.lines) > 3


def _steep(chart: Chart) -> bool:
    values = [y for line in chart.lines for y in line.y if y is not None]
    return max(values) > 8 * min(values) > 0


def _look(chart: Chart, number: int) -> tuple[str, Any]:
    if chart.ordered or len(chart.lines) > len(COLORS):
        return shade(number / max(1, len(chart.lines) - 1)), "-" if chart.ordered else DASHES[number % len(DASHES)]
    return COLORS[number], DASHES[number]


def _line(axes: Axes, line: Line, name: str, color: str, dashes: Any) -> None:
    for number, piece in enumerate(line.pieces):
        x, y, spread = ([point[i] or 0.0 for point in piece] for i in range(3))
        marker = "o" if line.points or len(piece) == 1 else ""
        look: dict[str, Any] = {"color": color, "linestyle": dashes, "marker": marker}
        axes.plot(x, y, **look, markersize=4, linewidth=1.5, label=None if number else name)
        if line.points and any(spread):
            axes.errorbar(x, y, yerr=spread, color=color, linestyle="", elinewidth=1, capsize=2.5)
        elif any(spread):
            low, high = ([b + sign * d for b, d in zip(y, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def write_confusion(confusion: Confusion, place: Path) -> list[Path]:
    """The confusion matrix: one row per true class."""
    mpl = need("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    classes, few = [short(name) for name in confusion.classes], len(confusion.classes) <= FEW
    with mpl.rc_context({**STYLE, "axes.grid": False, "axes.titlepad": 8, "axes.spines.bottom": False}):
        side = max(3.6, 0.36 * len(classes) + 1.2 + 0.08 * max(map(len, classes))) if few else 6.0
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(confusion.shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title="Confusion", xlabel="predicted", ylabel="true")
        if few:
            axes.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
            axes.set_yticks(range(len(classes)), classes)
            axes.tick_params(length=0)
            for t, p in confusion.count_TP.nonzero().tolist():
                color = "white" if confusion.shares[t, p] > 0.5 else INK
                axes.text(p, t, str(int(confusion.count_TP[t, p])), ha="center", va="center", color=color, fontsize=8)
        return save(figure, place)


def write_drawing(drawing: Drawing, place: Path) -> None:
    """Write a drawing as a PNG; `Drawing.svg` is the SVG."""
    mpl = need("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(drawing.width / PIXELS, drawing.height / PIXELS))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
        axes.axis("off")
        for x, panel in drawing.places():
            _panel(axes, panel, x, MARGIN)
        axes.text(MARGIN, drawing.height - 12, drawing.note, fontsize=7.5, color=SOFT)
        most = MOST_PIXELS * PIXELS / max(drawing.width, drawing.height)
        figure.savefig(place, dpi=min(2 * PIXELS, most), facecolor="white")


def _panel(axes: Axes, panel: Panel, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    scene, wires = panel.scene, panel.wires
    axes.text(x, y + 14, panel.title, fontsize=10, fontweight="bold")
    y += HEAD
    _stroke(axes, scene.ends(), x, y, color=FAINT, linewidth=0.7)
    for strength, alive, path in _by_look(panel):
        look = {"color": COLORS[0]} if alive else {"color": FAINT, "linestyle": (0, (2, 3))}
        faint = opacity(strength) * fading(wires) * (1 if alive else 0.5)
        _stroke(axes, path, x, y, alpha=faint, linewidth=0.72 * thickness(strength, wires), **look)
    for word, at in (("input", 10), ("output", scene.height - 2)):
        axes.text(x + scene.middle, y + at, word, fontsize=8, color=SOFT, ha="center")
    for layer, members in scene.numbered():
        axes.text(x + LABEL, y + scene.ys[members.start] + 4, str(layer), fontsize=8, color=SOFT, ha="right")
    wide, side, corner = scene.wide, scene.side, max(2, scene.side // 6)
    for k, alive in enumerate(wires.alive):
        edge: dict[str, Any] = {"ec": INK, "lw": 1.0} if alive else {"ec": FAINT, "lw": 0.7, "ls": (0, (3, 2))}
        place = (x + scene.xs[k] - wide / 2, y + scene.ys[k] - side / 2)
        box = f"round,pad=0,rounding_size={corner}"
        axes.add_patch(FancyBboxPatch(place, wide, side, boxstyle=box, fc="white", zorder=3, **edge))
        if scene.labels:
            kind: dict[str, Any] = {"fontsize": 7.9, "color": INK if alive else SOFT, "zorder": 4, "ha": "center"}
            axes.text(x + scene.xs[k], y + scene.ys[k] + 4, scene.labels[k], **kind)


def _by_look(panel: Panel) -> list[tuple[float, bool, str]]:
    """All wires that look the same as one path."""
    found: dict[tuple[float, bool], list[str]] = {}
    for edge in panel.wires.edges:
        look = (round(edge.strength, 2), panel.wires.alive[edge.target])
        found.setdefault(look, []).append(panel.scene.path(edge.source, edge.target))
    return [(strength, alive, "".join(paths)) for (strength, alive), paths in sorted(found.items())]


def _stroke(axes: Axes, drawn: str, x: float, y: float, **look: Any) -> None:
    """Draw an SVG path of the commands that `Scene` uses: M, L, C, H and V with absolute coordinates."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    if not drawn:
        return
    corners: list[tuple[float, float]] = []
    codes: list[int] = []
    for letter, text in re.findall(r"([MLCHV])([^MLCHV]*)", drawn):
        numbers = list(map(float, text.split()))
        if letter == "H":
            numbers = [numbers[0], corners[-1][1] - y]
        elif letter == "V":
            numbers = [corners[-1][0] - x, numbers[0]]
        points = [(x + a, y + b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        corners += points
        codes += [int({"M": Curve.MOVETO, "C": Curve.CURVE4}.get(letter, Curve.LINETO))] * len(points)
    axes.add_patch(PathPatch(Curve(corners, codes), fill=False, capstyle="round", **look))


def save(figure: Figure, place: Path) -> list[Path]:
    """Write a figure as SVG and PNG; `place` has no suffix."""
    written = [place.with_name(f"{place.name}.{kind}") for kind in ("svg", "png")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # matplotlib draws a box instead
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=2 * PIXELS)
    return written
