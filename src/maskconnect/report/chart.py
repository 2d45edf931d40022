"""A chart as data: its lines, and the words for its values. `charts.py` makes all charts of a report."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mode
from typing import NamedTuple

from maskconnect.report.history import Band


class Point(NamedTuple):
    """A known value."""

    x: float
    y: float
    deviation: float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line, or points, of a chart; where y is None, the point is missing."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    spread: tuple[float | None, ...] = ()  # standard deviations, where there are several seeds
    points: bool = False

    @property
    def known(self) -> list[Point]:
        """All points."""
        return [point for piece in self.pieces for point in piece]

    @property
    def pieces(self) -> list[list[Point]]:
        """The points, split where a value is missing. Values that are measured every few epochs are not split."""
        spread = self.spread or (None,) * len(self.y)
        points = [
            (i, Point(x, y, s)) for i, (x, y, s) in enumerate(zip(self.x, self.y, spread, strict=True)) if y is not None
        ]
        steps = [later - i for (i, _), (later, _) in pairwise(points)]
        usual = mode(steps) if steps else 1
        found: list[list[Point]] = []
        for step, (_, point) in zip([usual + 1, *steps], points, strict=False):
            if step > usual:
                found.append([])
            found[-1].append(point)
        return found

    @property
    def is_lone(self) -> bool:
        """Whether it has a single value over the epochs."""
        return not self.points and len(self.known) == 1


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart."""

    key: str  # the name of its file
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    log: bool = False
    ordered: bool = False  # lines have an order, and their colors follow it
    whole: bool = False  # values are counts
    most: float | None = None  # the largest possible value, such as 100 %
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see."""
        return not any(line.known for line in self.lines)

    @property
    def is_strip(self) -> bool:
        """Whether no line has more than one value over the epochs: numbers side by side say more than lone dots."""
        most = max((len(line.known) for line in self.lines), default=0)
        return most == 1 and not any(line.points for line in self.lines)

    @property
    def place(self) -> str:
        """The unit of the x axis: `epoch`, `module`, `fan-in`."""
        return self.x.partition(",")[0].removesuffix(" K")

    def text(self, point: Point) -> str:
        """A value with its deviation and unit: `96.94 ± 1.18 %`. Accuracies have the two decimals of the tables."""
        percent = self.y.endswith("%")
        value, deviation = (".2f", ".2f") if percent else (".4g", ".2g")
        spread = "" if point.deviation is None else f" ± {point.deviation:{deviation}}"
        return f"{point.y:{value}}{spread}{' %' * percent}"

    def legend(self, line: Line) -> str:
        """The name of a line, with its value if it has only one: text beside the dot would cover other lines."""
        return f"{line.name}: {self.text(line.known[0])}" if line.is_lone else line.name
