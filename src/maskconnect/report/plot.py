"""A chart as SVG for the page.

`figures.py` draws the same charts with matplotlib, as files for papers. The page cannot use those: it must work without
matplotlib, an optional extra; its colors follow the reader's light or dark mode; and its script shows the values of the
points that a reader points at.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator

from maskconnect.report.axes import BOTTOM, HEIGHT, RIGHT, TOP, WIDTH, Axes, span
from maskconnect.report.chart import Chart, Line, Point

COLORS = 8
"""The number of colors in the style sheet. More lines are drawn in shades from one color to another."""


def figure(chart: Chart) -> str:
    """The chart with its title and its legend."""
    legend = ""
    if len(chart.lines) > 1 and not chart.is_strip:
        items = (
            f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path {_look(chart, i)} {_stroke(line)}/></svg>'
            f"{html.escape(chart.legend(line))}</li>"
            for i, line in enumerate(chart.lines)
        )
        legend = f"<ul class=legend>{''.join(items)}</ul>"
    note = f"<p class=note>{html.escape(chart.note)}</p>" if chart.note else ""
    drawn = strip(chart) if chart.is_strip else plot(chart)
    return f"<figure class=chart><figcaption>{html.escape(chart.title)}</figcaption>{legend}{drawn}{note}</figure>"


def _stroke(line: Line) -> str:
    """Return the mark of a line in the legend: a stroke, or a dot for a lone value."""
    return 'class=dots d="M11 5h0"' if line.is_lone else 'd="M1 5H21"'


def strip(chart: Chart) -> str:
    """A chart of lines with one value each: a row per line, with its name, its place on a scale, and its value."""
    shown = [(line.name, point) for line in chart.lines for point in line.known]
    low, high = span(chart)
    rows = "".join(
        f"<li><span>{html.escape(name)}</span><i style='{_on_scale(point, low, high)}'></i>"
        f"<b>{chart.text(point)}</b></li>"
        for name, point in shown
    )
    epochs = sorted({point.x for _, point in shown})
    when = f"epoch {epochs[0]:g}" if len(epochs) == 1 else f"epochs {epochs[0]:g} to {epochs[-1]:g}"
    ends = f"{low:.4g} to {high:.4g}{' %' * chart.y.endswith('%')}"
    scale = f" The scale runs from {ends}." if len(shown) > 1 else ""
    return f"<ul class=strip>{rows}</ul><p class=note>Recorded once, after {when}.{scale}</p>"


def _on_scale(point: Point, low: float, high: float) -> str:
    """The place of a value and its deviation on a scale, as properties for the style sheet."""
    first, last = (max(low, min(high, point.y + sign * (point.deviation or 0))) for sign in (-1, 1))
    at, left, width = (100 * part / (high - low) for part in (point.y - low, first - low, last - first))
    return f"--at:{at:.1f}%;--from:{left:.1f}%;--width:{width:.1f}%"


def plot(chart: Chart) -> str:
    """The chart alone; the script of the page reads the values to show from `data-chart`."""
    axes = Axes(chart)
    parts = [*_bands(chart, axes), *_frame(chart, axes)]
    for number, line in enumerate(chart.lines):
        parts += _line(line, _look(chart, number), axes)
    box = (
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{html.escape(_words(chart), quote=True)}"'
    )
    return f"<svg class=plot {box} {_data(chart, axes)}>{''.join(parts)}</svg>"


def _words(chart: Chart) -> str:
    """The chart for a screen reader: the last value of every line."""
    ends = [f"{line.name} ends at {chart.text(line.known[-1])}" for line in chart.lines if line.known]
    return f"{chart.title}: {', '.join(ends)}"


def _data(chart: Chart, axes: Axes) -> str:
    at = sorted({x for line in chart.lines for x in line.x})
    known = [{point.x: point for point in line.known} for line in chart.lines]
    data = {
        "x": at,
        "at": [axes.at_x(x) for x in at],
        "name": _names(chart),
        "y": [[chart.text(line[x]) if x in line else None for x in at] for line in known],
        "places": [[axes.at_y(line[x].y) if x in line else None for x in at] for line in known],
    }
    words = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False), quote=True)
    return f'data-chart="{words}" data-x="{chart.place}"'


def _names(chart: Chart) -> list[str]:
    """Return the label before each value: the name of its line; for a single line, the quantity, unless it is a %."""
    alone = len(chart.lines) == 1 and not chart.y.endswith("%")
    return [chart.y] if alone else [line.name for line in chart.lines]


def _bands(chart: Chart, axes: Axes) -> Iterator[str]:
    for number, band in enumerate(chart.bands):
        left, right = axes.at_x(band.start), axes.at_x(band.end)
        size = f'width="{round(right - left, 1)}" height="{HEIGHT - TOP - BOTTOM}"'
        yield f'<rect class="band b{number % 2}" x="{left}" y="{TOP}" {size}/>'
        if right - left > 6 * len(band.name) + 4:
            yield f'<text class=phase x="{round((left + right) / 2, 1)}" y="{TOP - 6}">{html.escape(band.name)}</text>'


def _frame(chart: Chart, axes: Axes) -> Iterator[str]:
    for tick, text in zip(axes.y_ticks, axes.y_texts, strict=True):
        y = axes.at_y(tick)
        yield f'<path class=grid d="M{axes.left} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text class=y x="{axes.left - 6}" y="{y + 4}">{text}</text>'
    for tick in axes.x_ticks:
        yield f'<text class=x x="{axes.at_x(tick)}" y="{HEIGHT - BOTTOM + 16}">{tick:g}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text class=x x="{(axes.left + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{html.escape(chart.x)}</text>'
    yield f'<text class=x transform="translate(12 {middle}) rotate(-90)">{html.escape(chart.y)}</text>'


def _line(line: Line, look: str, axes: Axes) -> Iterator[str]:
    def at(point: Point, sign: int = 0) -> str:
        return f"{axes.at_x(point.x)} {axes.at_y(max(axes.y[0], point.y + sign * (point.deviation or 0)))}"

    if line.points:
        yield from (_bar(point, look, axes) for point in line.known if point.deviation)
    elif any(point.deviation for point in line.known):
        around = ([at(p, 1) for p in piece] + [at(p, -1) for p in reversed(piece)] for piece in line.pieces)
        area = "".join(f"M{'L'.join(corners)}z" for corners in around)
        yield f'<path class=area {look} d="{area}"/>'
    path = "".join(f"M{'L'.join(map(at, piece))}" for piece in line.pieces)
    yield f'<path class=line {look} d="{path}"/>'
    dots = "".join(f"M{at(p)}h0" for piece in line.pieces for p in piece if line.points or len(piece) == 1)
    if dots:
        yield f'<path class=dots {look} d="{dots}"/>'


def _bar(point: Point, look: str, axes: Axes) -> str:
    """An error bar."""
    deviation, x = point.deviation or 0, axes.at_x(point.x)
    top, bottom = axes.at_y(point.y + deviation), axes.at_y(max(axes.y[0], point.y - deviation))
    return f'<path class=bar {look} d="M{x - 3} {top}h6M{x} {top}V{bottom}M{x - 3} {bottom}h6"/>'


def _look(chart: Chart, number: int) -> str:
    """The color of a line, and its dashes, which distinguish lines without color."""
    if not chart.ordered and len(chart.lines) <= COLORS:
        return f"data-c={number}"
    color = shade(number / max(1, len(chart.lines) - 1))
    dashes = "" if chart.ordered else f" data-d={number % COLORS}"
    return f'style="stroke:{color};color:{color}"{dashes}'


def shade(share: float) -> str:
    """From blue to orange, which color-blind readers can distinguish too."""
    ends = ((0, 114, 178), (230, 159, 0))
    mixed = (round(a + (b - a) * share) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
