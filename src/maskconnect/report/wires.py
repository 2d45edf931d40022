"""A wiring as it is drawn (figure 4): who reads whom, how sure the real masks are of that, and where blocks stand.

Depth goes from top to bottom. Branches of a layer stand in a row, joined by straight lines to the row below; a chain
stands in a column, and a wire that skips a block runs in an arc at its right. The layers are known, so no layout has to
be searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.wiring import Layout, Sources, reaching_output


class Edge(NamedTuple):
    """One connection."""

    source: int
    target: int
    value: float  # of the real mask, normalised as before every draw; 1/K where the wiring was never learned
    strength: float  # how likely it is among K draws from the mask; 1 where the wiring was never learned


@dataclass(frozen=True)
class Wires:
    """A wiring with the values of the real masks at its connections."""

    layout: Layout
    sources: Sources
    values: tuple[tuple[float, ...], ...]  # one for each source of each module
    learned: bool

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All connections, by target and then by source."""
        return tuple(
            Edge(source, target, value, 1 - (1 - value) ** len(row) if self.learned else 1.0)
            for target, row in enumerate(self.sources)
            for source, value in zip(row, self.values[target], strict=True)
        )

    @cached_property
    def alive(self) -> tuple[bool, ...]:
        """Which modules can reach the output; pruning takes all others away (D10)."""
        return reaching_output(self.sources, self.layout.outputs)

    @property
    def active_by_layer(self) -> list[int]:
        """How many branches of each layer are used (figures 5 and 6)."""
        return [sum(self.alive[k] for k in layer) for layer in self.layout.layers]

    @property
    def readers(self) -> list[int]:
        """How many modules read each module."""
        counts = [0] * len(self.sources)
        for edge in self.edges:
            counts[edge.source] += 1
        return counts


def fixed_wires(layout: Layout, sources: Sources) -> Wires:
    """A wiring that was never learned: its connections are all alike."""
    return Wires(layout, sources, tuple(tuple(1 / len(row) for _ in row) for row in sources), learned=False)


def usual_wires(layout: Layout) -> Wires:
    """What people would have wired by hand: a plain ResNet's chain, a plain ResNeXt's full layers."""
    return fixed_wires(layout, layout.candidates() if layout.layered else layout.prev())


def wires_of(masks: ConnectivityMasks) -> Wires:
    """The frozen wiring of a stack, or the top-K of its masks."""
    sources = masks.settled().sources
    if not masks.learned:
        return fixed_wires(masks.layout, sources)
    return learned_wires(masks.layout, masks.candidates, sources, masks.real.detach().cpu())


def learned_wires(layout: Layout, candidates: Sources, sources: Sources, real_TS: Tensor) -> Wires:
    """A wiring with the values of the masks that it was learned by; T are targets, S their candidates."""
    values: list[tuple[float, ...]] = [()] * layout.targets.start
    for target, row in zip(layout.targets, real_TS.double().tolist(), strict=True):
        share = _normalised(row[: len(candidates[target])])
        at = dict(zip(candidates[target], share, strict=True))
        values.append(tuple(at[source] for source in sources[target]))
    return Wires(layout, sources, tuple(values), learned=True)


def _normalised(row: Sequence[float]) -> list[float]:
    """A mask as it will be drawn from: its sum is 1, and one of nothing but zeros starts from uniform (D6)."""
    total = sum(row)
    return [value / total for value in row] if total > 0 else [1 / len(row)] * len(row)


TOP = 40
"""Above the first row: room for the word "input"."""

LEFT = 40
"""Beside the first branch: room for the number of a row."""

LONG = 60
"""Chains with more blocks are drawn smaller."""

PIECES = (0.06, 0.18, 0.33, 0.5, 0.67, 0.82, 0.94)
"""Of the way along an arc, where it bends."""


@dataclass(frozen=True)
class Scene:
    """The geometry of a stack, in whole pixels."""

    layout: Layout

    @cached_property
    def side(self) -> int:
        """Of the square that is a block."""
        if self.layout.layered:
            return max(6, self._pitch * 5 // 8)
        return 18 if len(self.layout.sizes) <= 24 else 14 if len(self.layout.sizes) <= LONG else 8

    @cached_property
    def _pitch(self) -> int:
        """From one branch of a row to the next."""
        return max(9, min(38, 560 // max(self.layout.sizes)))

    @cached_property
    def row(self) -> int:
        """From one row to the next."""
        return 56 + max(self.layout.sizes) // 4 if self.layout.layered else 28 if self.side == 18 else self.side + 6

    @cached_property
    def xs(self) -> tuple[int, ...]:
        """The middle of every block."""
        if not self.layout.layered:
            return (LEFT + self.side // 2,) * len(self.layout.places)
        widest, sizes = max(self.layout.sizes), self.layout.sizes
        return tuple(
            LEFT + self._pitch // 2 + self._pitch * (2 * branch + widest - sizes[layer]) // 2
            for layer, branch in self.layout.places
        )

    @cached_property
    def ys(self) -> tuple[int, ...]:
        """The middle of every block."""
        return tuple(TOP + self.side // 2 + self.row * layer for layer, _ in self.layout.places)

    @cached_property
    def bulges(self) -> tuple[int, ...]:
        """How far the arc over so many blocks of a chain leans out."""
        last = max(1, len(self.layout.sizes) - 1)
        widest = min(330, 90 + 14 * last)
        return tuple(int(widest * (distance / last) ** 0.75 + 0.5) for distance in range(last + 1))

    @property
    def every(self) -> int:
        """Every how many rows there is room for a number."""
        return 5 if self.row < 16 else 1

    @cached_property
    def width(self) -> int:
        """Of the whole drawing."""
        if self.layout.layered:
            return LEFT + self._pitch * max(self.layout.sizes) + 12
        return self.reach(len(self.layout.sizes) - 1)

    def reach(self, distance: int) -> int:
        """How wide a chain is whose longest connection leads over so many blocks."""
        arc = self.bulges[distance] * 3 // 4 if distance > 1 else 0
        return LEFT + self.side + max(28, arc) + 14

    @cached_property
    def height(self) -> int:
        """Of the whole drawing."""
        return TOP + self.row * (len(self.layout.sizes) - 1) + self.side + TOP

    @property
    def middle(self) -> int:
        """Where "input" and "output" stand."""
        return (min(self.xs) + max(self.xs)) // 2

    @cached_property
    def bends(self) -> tuple[tuple[float, float], ...]:
        """Where an arc of a long chain bends: thousands of arcs are drawn twice as fast by straight pieces."""
        if self.layout.layered or len(self.layout.sizes) <= LONG:
            return ()
        return tuple((round(3 * t * (1 - t), 4), round(t * t * (3 - 2 * t), 4)) for t in PIECES)

    def numbered(self) -> Iterator[tuple[int, range]]:
        """The layers that have a number beside them; numbers that would touch are left out."""
        return ((layer, members) for layer, members in enumerate(self.layout.layers) if layer % self.every == 0)

    def path(self, source: int, target: int) -> str:
        """The curve of a connection, as SVG says it; the script of the page says the same."""
        half = self.side // 2
        x1, y1, x2, y2 = self.xs[source], self.ys[source], self.xs[target], self.ys[target]
        if self.layout.layered:
            return f"M{x1} {y1 + half}L{x2} {y2 - half}"
        if target - source == 1:
            return f"M{x1} {y1 + half}V{y2 - half}"
        edge, bulge = x1 + half, self.bulges[target - source]
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
