"""A wiring as it is drawn (figure 4): who reads whom, and with which mask values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, nn

from maskconnect.core.residual import Residual
from maskconnect.core.stack import MaskedStack
from maskconnect.core.wiring import Layout, Sources, reaching_output
from maskconnect.models import Spec
from maskconnect.report.scene import Scene


class Edge(NamedTuple):
    """One connection."""

    source: int
    target: int
    value: float  # of the real mask, normalized as before every draw; 1/K where the wiring was never learned
    strength: float  # how likely it is among K draws from the mask; 1 where the wiring was never learned


@dataclass(frozen=True)
class Wires:
    """A wiring with the values of the real masks at its connections."""

    layout: Layout
    sources: Sources
    values: tuple[tuple[float, ...], ...]  # one for each source of each module
    learned: bool
    kinds: tuple[str, ...] = ()  # of each module, "" where it has none; empty where no module has one
    candidates: Sources = ()  # of each module; empty where the wiring was never learned
    shares: tuple[tuple[float, ...], ...] = ()  # the mask value of each candidate

    @cached_property
    def scene(self) -> Scene:
        """Where everything is drawn."""
        return Scene(self.layout, self.kinds)

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
        """Which modules can reach the output; pruning removes all others (D10)."""
        return reaching_output(self.sources, self.layout.outputs)

    def rejected(self, module: int) -> list[tuple[int, float]]:
        """The candidates that a module does not read, each with its mask value."""
        if not self.candidates:
            return []
        pairs = zip(self.candidates[module], self.shares[module], strict=True)
        return [pair for pair in pairs if pair[0] not in self.sources[module]]

    @property
    def unit(self) -> str:
        """The word for a row of branches: "module" if they are alike (ResNeXt), otherwise "layer"."""
        return "layer" if self.kinds else "module"

    @property
    def active_by_layer(self) -> list[int]:
        """The number of branches of each layer that are used (figures 5 and 6)."""
        return [sum(self.alive[k] for k in layer) for layer in self.layout.layers]

    @property
    def readers(self) -> list[int]:
        """The number of modules that read each module."""
        counts = [0] * len(self.sources)
        for edge in self.edges:
            counts[edge.source] += 1
        return counts


def fixed_wires(layout: Layout, sources: Sources, kinds: tuple[str, ...] = ()) -> Wires:
    """A wiring that was never learned: all its connections are equal."""
    values = tuple(tuple(1 / len(row) for _ in row) for row in sources)
    return Wires(layout, sources, values, learned=False, kinds=kinds)


def usual_wires(spec: Spec) -> Wires:
    """The wiring of the plain network: ResNet's chain, ResNeXt's full layers, a chain of the first kind of branch."""
    layout = spec.layout
    return fixed_wires(layout, layout.prev() if spec.PLAIN == "prev" else layout.candidates(), spec.module_kinds)


def wires_of(stack: MaskedStack) -> Wires:
    """The frozen wiring of a stack, or the top-K of its masks."""
    masks, kinds = stack.masks, kinds_of(stack)
    sources = masks.current_wiring().sources
    if not masks.learned:
        return fixed_wires(masks.layout, sources, kinds)
    return learned_wires(masks.layout, masks.candidates, sources, masks.real.detach().cpu(), kinds)


def kinds_of(stack: MaskedStack) -> tuple[str, ...]:
    """The kind of each module of a stack: its attribute `kind`, if that is text.

    Where no module has one, the names of their classes; empty where these are all the same.
    """
    found = (getattr(module, "kind", "") for module in stack.flat())
    kinds = tuple(kind if isinstance(kind, str) else "" for kind in found)
    names = kinds if any(kinds) else tuple(map(_class_name, stack.flat()))
    return names if any(kinds) or len(set(names)) > 1 else ()


def _class_name(module: nn.Module) -> str:
    """The class of a module, or of what it wraps."""
    return type(module.residual if isinstance(module, Residual) else module).__name__


def learned_wires(
    layout: Layout, candidates: Sources, sources: Sources, real_TS: Tensor, kinds: tuple[str, ...] = ()
) -> Wires:
    """A wiring with the masks that it was learned by; T are targets, S their candidates."""
    values: list[tuple[float, ...]] = [()] * layout.targets.start
    shares = list(values)
    for target, row in zip(layout.targets, real_TS.double().tolist(), strict=True):
        share = _normalized(row[: len(candidates[target])])
        at = dict(zip(candidates[target], share, strict=True))
        values.append(tuple(at[source] for source in sources[target]))
        shares.append(tuple(share))
    return Wires(layout, sources, tuple(values), True, kinds, candidates, tuple(shares))


def _normalized(row: Sequence[float]) -> list[float]:
    """A mask as it is drawn from: its sum is 1, and a row of zeros starts from uniform (D6)."""
    total = sum(row)
    return [value / total for value in row] if total > 0 else [1 / len(row)] * len(row)
