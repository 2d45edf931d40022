"""The positions of the blocks and wires of a drawing (figure 4).

Depth goes from top to bottom. Branches of a layer stand in a row, joined by straight lines to the row below; a chain
stands in a column, and a wire that skips a block runs in an arc at its right. The layers are known, so no layout has to
be searched for. A block is a square; where modules have kinds, it is a rectangle with its kind inside.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from maskconnect.core.wiring import Layout

TOP = 40
"""The room above the first row, for the word "input"."""

LEFT = 40
"""The room beside the first branch, for the number of the row."""

LONG = 60
"""Chains with more blocks are drawn smaller."""

LETTER = 6.7
"""The width of a letter of 11 px, in a wide font; East Asian ones are twice as wide."""

LONGEST = 20
"""The number of letters of a kind that a block shows."""

PIECES = (0.06, 0.18, 0.33, 0.5, 0.67, 0.82, 0.94)
"""The points at which an arc bends, as parts of its length."""


@dataclass(frozen=True)
class Scene:
    """The geometry of a stack, in whole pixels."""

    layout: Layout
    kinds: tuple[str, ...] = ()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The text in each block; a long one is shortened."""
        return tuple(kind if len(kind) <= LONGEST else f"{kind[: LONGEST - 1]}…" for kind in self.kinds)

    @cached_property
    def wide(self) -> int:
        """The width of a block."""
        if not self.kinds:
            return self.side
        return max(self.side, 6 + 2 * math.ceil(max(map(_text_width, self.labels)) / 2))

    @cached_property
    def side(self) -> int:
        """The height of a block; without kinds, the width too."""
        if self.kinds:
            return 22
        if self.layout.layered:
            return max(6, self._pitch * 5 // 8)
        return 18 if len(self.layout.sizes) <= 24 else 14 if len(self.layout.sizes) <= LONG else 8

    @cached_property
    def _pitch(self) -> int:
        """The distance from one branch of a row to the next."""
        if self.kinds:
            return self.wide + 8
        return max(9, min(38, 560 // max(self.layout.sizes)))

    @cached_property
    def row(self) -> int:
        """The distance from one row to the next."""
        if self.kinds:  # wires to far branches need height
            return 56 + min(64, 6 * max(self.layout.sizes)) if self.layout.layered else self.side + 14
        return 56 + max(self.layout.sizes) // 4 if self.layout.layered else 28 if self.side == 18 else self.side + 6

    @cached_property
    def xs(self) -> tuple[int, ...]:
        """The horizontal middle of every block."""
        if not self.layout.layered:
            return (LEFT + self.wide // 2,) * len(self.layout.places)
        widest, sizes = max(self.layout.sizes), self.layout.sizes
        return tuple(
            LEFT + self._pitch // 2 + self._pitch * (2 * branch + widest - sizes[layer]) // 2
            for layer, branch in self.layout.places
        )

    @cached_property
    def ys(self) -> tuple[int, ...]:
        """The vertical middle of every block."""
        return tuple(TOP + self.side // 2 + self.row * layer for layer, _ in self.layout.places)

    @cached_property
    def bulges(self) -> tuple[int, ...]:
        """The width of an arc in a chain, by the number of blocks that it spans."""
        last = max(1, len(self.layout.sizes) - 1)
        widest = min(330, 90 + 14 * last)
        return tuple(int(widest * (distance / last) ** 0.75 + 0.5) for distance in range(last + 1))

    @property
    def every(self) -> int:
        """The number of rows from one row number to the next that has room."""
        return 5 if self.row < 16 else 1

    @cached_property
    def width(self) -> int:
        """The width of the whole drawing."""
        if self.layout.layered:
            return LEFT + self._pitch * max(self.layout.sizes) + 12
        return self.reach(len(self.layout.sizes) - 1)

    def reach(self, distance: int) -> int:
        """The width of a chain whose longest connection spans `distance` blocks."""
        arc = self.bulges[distance] * 3 // 4 if distance > 1 else 0
        return LEFT + self.wide + max(28, arc) + 14

    @cached_property
    def height(self) -> int:
        """The height of the whole drawing."""
        return TOP + self.row * (len(self.layout.sizes) - 1) + self.side + TOP

    @property
    def middle(self) -> int:
        """The horizontal middle of the words "input" and "output"."""
        return (min(self.xs) + max(self.xs)) // 2

    @cached_property
    def bends(self) -> tuple[tuple[float, float], ...]:
        """The bends of an arc in a long chain: thousands of arcs are drawn twice as fast with straight lines."""
        if self.layout.layered or len(self.layout.sizes) <= LONG:
            return ()
        return tuple((round(3 * t * (1 - t), 4), round(t * t * (3 - 2 * t), 4)) for t in PIECES)

    def numbered(self) -> Iterator[tuple[int, range]]:
        """The layers that have a number beside them; numbers that would touch are left out."""
        return ((layer, members) for layer, members in enumerate(self.layout.layers) if layer % self.every == 0)

    def path(self, source: int, target: int) -> str:
        """The curve of a connection as an SVG path; `curve` in page.js draws the same."""
        half = self.side // 2
        x1, y1, x2, y2 = self.xs[source], self.ys[source], self.xs[target], self.ys[target]
        if self.layout.layered:
            return f"M{x1} {y1 + half}L{x2} {y2 - half}"
        if target - source == 1:
            return f"M{x1} {y1 + half}V{y2 - half}"
        edge, bulge = x1 + self.wide // 2, self.bulges[target - source]
        if self.bends:
            points = (f"L{int(edge + bulge * out + 0.5)} {int(y1 + (y2 - y1) * on + 0.5)}" for out, on in self.bends)
            return f"M{edge} {y1}{''.join(points)}L{edge} {y2}"
        out = edge + bulge
        return f"M{edge} {y1}C{out} {y1} {out} {y2} {edge} {y2}"

    def ends(self) -> str:
        """The lines from the input of the stack, and to its output."""
        half, drawn = self.side // 2, ""
        for bar, word, edge, layer in (
            (TOP - 12, 14, -half, self.layout.layers[0]),
            (self.height - TOP + 12, self.height - 14, half, self.layout.layers[-1]),
        ):
            drawn += f"M{self.middle} {word}V{bar}"
            drawn += f"M{self.xs[layer[0]]} {bar}H{self.xs[layer[-1]]}" if len(layer) > 1 else ""
            drawn += "".join(f"M{self.xs[k]} {bar}V{self.ys[k] + edge}" for k in layer)
        return drawn


def _text_width(text: str) -> float:
    """The approximate width of a label: an SVG file cannot measure its text."""
    return LETTER * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
