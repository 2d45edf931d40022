"""One wiring of a stack, as it is drawn: who reads whom, and how sure the real masks are of that."""

from __future__ import annotations

from collections.abc import Sequence
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
