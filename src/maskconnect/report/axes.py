"""The axes of a chart on the page: from values to pixels, and round numbers for ticks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from maskconnect.report.chart import Chart, Line

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 20, 40
"""The margins; the left one grows with the longest tick."""

DIGIT = 7.8
"""The width of a digit of a tick, in a wide font."""

TITLE = 30
"""The room at the left of the ticks for the title of the vertical axis, and the distance of the ticks from the plot."""

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
            low, high = self.y = span(chart)
            self.y_ticks = [
                tick
                for tick in ticks(low, high, whole=chart.whole)
                if low - 1e-9 * high <= tick <= high + 1e-9 * abs(high)
            ]
        self.x_ticks = [tick for tick in ticks(*self.x, most=8, whole=True) if self.x[0] <= tick <= self.x[1]]
        self.y_texts = tick_texts(self.y_ticks)
        self.left = max(LEFT, round(TITLE + DIGIT * max(map(len, self.y_texts), default=0)))

    def at_x(self, x: float) -> float:
        """The position of a value."""
        low, high = self.x
        return round(self.left + (WIDTH - self.left - RIGHT) * (x - low) / (high - low), 1)

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


def span(chart: Chart) -> tuple[float, float]:
    """The vertical axis: from the least value to the largest with some room, but not beyond what is possible."""
    ys = [y for line in chart.lines for y in _reach(line)]
    least = min(point.y for line in chart.lines for point in line.known)
    low, high = (min(ys) - 1, max(ys) + 1) if chart.whole and min(ys) == max(ys) else _padded(min(ys), max(ys))
    room = PADDING * (high - low)
    low = max(0.0, low - room) if least >= 0 else low - room
    high = high + room if chart.most is None else max(min(high + room, chart.most), least)
    return low, high


def _reach(line: Line) -> Iterator[float]:
    for _, y, deviation in line.known:
        yield y - (deviation or 0)
        yield y + (deviation or 0)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = max(0.5, abs(low) * 0.01)
    return (low, high) if high - low > 1e-9 * abs(low) else (low - room, high + room)
