"""A chart as SVG for the page.

`figures.py` draws the same charts with matplotlib, as files for papers. The page cannot use those: it must work without
matplotlib, an optional extra; its colors follow the reader's light or dark mode; and its script shows the values of the
points that a reader points at.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence

from maskconnect.report.charts import Chart, Line

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 20, 40
COLORS = 8
"""The number of colors in the style sheet. More lines are drawn in shades from one color to another."""

PADDING = 0.05
"""The room above and below the values, as a part of their range."""


class Axes:
    """From values to pixels. The vertical axis spans the values with some room, and does not have to start at 0."""

    def __init__(self, chart: Chart) -> None:
        xs = [x for line in chart.lines for x in line.x] + [edge for b in chart.bands for edge in (b.start, b.end)]
        self.x = _padded(min(xs), max(xs)) if not chart.bands else (min(xs), max(xs))
        if any(line.points for line in chart.lines) and not chart.bands:
            margin = 0.04 * (self.x[1] - self.x[0])
            self.x = self.x[0] - margin, self.x[1] + margin
        ys = [y for line in chart.lines for y in _reach(line)]
        self.log = chart.log and max(ys) > 8 * min(ys) > 0
        if self.log:
            self.y = min(ys) / 1.15, max(ys) * 1.15
            self.y_ticks = log_ticks(*self.y)
        else:
            self.y = _range(chart, min(ys), max(ys))
            low, high = self.y
            self.y_ticks = [
                tick
                for tick in ticks(low, high, whole=chart.whole)
                if low - 1e-9 * high <= tick <= high + 1e-9 * abs(high)
            ]
        self.x_ticks = [tick for tick in ticks(*self.x, most=8, whole=True) if self.x[0] <= tick <= self.x[1]]

    def at_x(self, x: float) -> float:
        """The position of a value."""
        low, high = self.x
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / (high - low), 1)

    def at_y(self, y: float) -> float:
        """The position of a value."""
        low, high = self.y
        share = (math.log(y / low) / math.log(high / low)) if self.log else (y - low) / (high - low)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers that cover an interval."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    step = max(1.0, float(round(step))) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or the numbers 1, 2, 5 between them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 3 else (1, 2, 5)
    return [tick for p in powers for f in factors if low * 0.999 <= (tick := f * 10.0**p) <= high * 1.001]


def tick_texts(found: Sequence[float]) -> list[str]:
    """Ticks with as many digits as it takes to make them differ."""
    for digits in range(4, 17):
        texts = [f"{tick:.{digits}g}" for tick in found]
        if len(set(texts)) == len(texts):
            break
    return texts


def _reach(line: Line) -> Iterator[float]:
    spread = line.spread or (None,) * len(line.y)
    for y, deviation in zip(line.y, spread, strict=True):
        if y is not None:
            yield y - (deviation or 0)
            yield y + (deviation or 0)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = max(0.5, abs(low) * 0.01)
    return (low, high) if high - low > 1e-9 * abs(low) else (low - room, high + room)


def _range(chart: Chart, low: float, high: float) -> tuple[float, float]:
    """The vertical axis: from the least value to the largest with some room, but not beyond what is possible."""
    least = min(y for line in chart.lines for y in line.y if y is not None)
    low, high = (low - 1, high + 1) if chart.whole and low == high else _padded(low, high)
    room = PADDING * (high - low)
    low = max(0.0, low - room) if least >= 0 else low - room
    high = high + room if chart.most is None else max(min(high + room, chart.most), least)
    return low, high


def figure(chart: Chart) -> str:
    """The chart with its title and its legend."""
    legend = ""
    if len(chart.lines) > 1 and not chart.is_strip:
        items = (
            f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path {_look(chart, i)} d="M1 5H21"/></svg>'
            f"{html.escape(line.name)}</li>"
            for i, line in enumerate(chart.lines)
        )
        legend = f"<ul class=legend>{''.join(items)}</ul>"
    note = f"<p class=note>{html.escape(chart.note)}</p>" if chart.note else ""
    drawn = strip(chart) if chart.is_strip else plot(chart)
    return f"<figure class=chart><figcaption>{html.escape(chart.title)}</figcaption>{legend}{drawn}{note}</figure>"


def strip(chart: Chart) -> str:
    """A chart of lines with one value each: a row per line, with its name, its place on a scale, and its value."""
    shown = [
        (line.name, x, y, deviation)
        for line in chart.lines
        for x, y, deviation in zip(line.x, line.y, line.spread or (None,) * len(line.y), strict=True)
        if y is not None
    ]
    low, high = _range(chart, min(y for _, _, y, _ in shown), max(y for _, _, y, _ in shown))
    unit = f" {chart.y}" if chart.y == "%" else ""
    rows = "".join(
        f"<li><span>{html.escape(name)}</span><i style='--at:{100 * (y - low) / (high - low):.1f}%'></i>"
        f"<b>{y:.4g}{'' if deviation is None else f' ± {deviation:.2g}'}{unit}</b></li>"
        for name, _, y, deviation in shown
    )
    epochs = sorted({x for _, x, _, _ in shown})
    when = f"epoch {epochs[0]:g}" if len(epochs) == 1 else f"epochs {epochs[0]:g} to {epochs[-1]:g}"
    scale = f" The scale runs from {low:.4g} to {high:.4g}{unit}." if len(shown) > 1 else ""
    return f"<ul class=strip>{rows}</ul><p class=note>Evaluated once, after {when}.{scale}</p>"


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
    ends = []
    for line in chart.lines:
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        if known:
            ends.append(f"{line.name} ends at {known[-1][1]:.4g}")
    return f"{chart.title}: {', '.join(ends)}"


def _data(chart: Chart, axes: Axes) -> str:
    at = sorted({x for line in chart.lines for x in line.x})
    known = [dict(zip(line.x, line.y, strict=True)) for line in chart.lines]
    values = [[line.get(x) for x in at] for line in known]
    shown = [[None if y is None else float(f"{y:.4g}") for y in row] for row in values]
    places = [[None if y is None else axes.at_y(y) for y in row] for row in values]
    data = {"x": at, "at": [axes.at_x(x) for x in at], "name": [line.name for line in chart.lines], "y": shown}
    data |= {"places": places}
    words = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False), quote=True)
    return f'data-chart="{words}" data-x="{chart.x}"'


def _bands(chart: Chart, axes: Axes) -> Iterator[str]:
    for number, band in enumerate(chart.bands):
        left, right = axes.at_x(band.start), axes.at_x(band.end)
        size = f'width="{round(right - left, 1)}" height="{HEIGHT - TOP - BOTTOM}"'
        yield f'<rect class="band b{number % 2}" x="{left}" y="{TOP}" {size}/>'
        if right - left > 6 * len(band.name) + 4:
            yield f'<text class=phase x="{round((left + right) / 2, 1)}" y="{TOP - 6}">{html.escape(band.name)}</text>'


def _frame(chart: Chart, axes: Axes) -> Iterator[str]:
    for tick, text in zip(axes.y_ticks, tick_texts(axes.y_ticks), strict=True):
        y = axes.at_y(tick)
        yield f'<path class=grid d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text class=y x="{LEFT - 6}" y="{y + 4}">{text}</text>'
    for tick in axes.x_ticks:
        yield f'<text class=x x="{axes.at_x(tick)}" y="{HEIGHT - BOTTOM + 16}">{tick:g}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text class=x x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{html.escape(chart.x)}</text>'
    yield f'<text class=x transform="translate(12 {middle}) rotate(-90)">{html.escape(chart.y)}</text>'


def _line(line: Line, look: str, axes: Axes) -> Iterator[str]:
    spread = line.spread or (None,) * len(line.y)
    known = [(axes.at_x(x), y, s) for x, y, s in zip(line.x, line.y, spread, strict=True) if y is not None]
    for x, y, deviation in known:
        if deviation and line.points:
            top, bottom = axes.at_y(y + deviation), axes.at_y(max(axes.y[0], y - deviation))
            yield f'<path class=bar {look} d="M{x - 3} {top}h6M{x} {top}V{bottom}M{x - 3} {bottom}h6"/>'
    if not line.points and any(s for _, _, s in known):
        above = [f"{x} {axes.at_y(y + (s or 0))}" for x, y, s in known]
        below = [f"{x} {axes.at_y(max(axes.y[0], y - (s or 0)))}" for x, y, s in reversed(known)]
        yield f'<path class=area {look} d="M{"L".join(above + below)}z"/>'
    path = "".join(f"{'L' if i else 'M'}{x} {axes.at_y(y)}" for i, (x, y, _) in enumerate(known))
    yield f'<path class=line {look} d="{path}"/>'
    if line.points or len(known) == 1:
        dots = "".join(f"M{x} {axes.at_y(y)}h0" for x, y, _ in known)
        yield f'<path class=dots {look} d="{dots}"/>'
    if len(known) == 1 and not line.points:
        x, y, _ = known[0]
        side = "y value" if x > WIDTH / 2 else "start value"
        beside = axes.at_y(y) + (-8 if axes.at_y(y) > TOP + 16 else 18)
        yield f'<text class="{side}" x="{x}" y="{round(beside, 1)}">{y:.4g}</text>'


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
