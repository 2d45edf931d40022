"""The input of one target in a forward pass, from the outputs of its active sources (Eq. 1).

A target that reads all modules before it uses their running sum; other targets add their sources. `mc.reference()`
computes Eq. 1 literally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from maskconnect.core.aggregate import divisor_of, masked_total, reference_total, scaled_total, total, weighted
from maskconnect.core.binary import BinaryMasks
from maskconnect.core.credit import Sampler, Seen
from maskconnect.core.layers import LayerAggregation
from maskconnect.core.outputs import INPUT, Outputs, Shapes
from maskconnect.core.reference import is_reference
from maskconnect.core.running import MIN_SOURCES, RunningSum
from maskconnect.core.wiring import Layout, Sources


@dataclass(eq=False)
class Reading:
    """The sources of a target: single outputs, or the sum of all modules before it."""

    found: list[Any] = field(default_factory=list)
    sums: list[Tensor] | None = None  # one sum per part of pairs
    seen: Seen | None = None  # what its mask gradient uses, while masks learn


@dataclass(kw_only=True)
class Targets:
    """Computes the input of each target in one forward pass."""

    layout: Layout
    candidates: Sources
    masks: BinaryMasks
    real: Tensor
    rows: tuple[Tensor, ...] | None  # the mask of each target, binary or blended, while masks are learned
    aggregation: str | Callable[[Sequence[Any], Tensor], Any] | LayerAggregation
    credit: str = "whole"  # see `Learning.credit`
    images: int | None = None  # see `Learning.images`
    scales: Tensor | None = None  # of all candidates of all targets, for aggregation="scaled"

    @property
    def learning(self) -> bool:
        """Whether masks learn in this pass."""
        return self.rows is not None

    @cached_property
    def shares(self) -> dict[int, list[float]]:
        """The mask of each target as a list of numbers."""
        return dict(zip(self.layout.targets, self.masks.mask_TS.tolist(), strict=True))

    def outputs(self, x: Any, align: Callable[[Tensor, Size], Tensor | None] | None, known: Shapes | None) -> Outputs:
        """Return an empty container for the outputs of this pass, whose input is x."""
        pairs, tensors = self.aggregation == "residual", not callable(self.aggregation)
        shared: frozenset[tuple[int, int]] = self._shared() if pairs else frozenset()
        return Outputs(
            self.layout,
            align,
            only_tensors=tensors,
            known=known,
            pairs=pairs,
            shared=shared,
            first=x,
            sampler=Sampler(self.images),
            running=RunningSum(),  # passed explicitly, because the compiler does not follow a default
        )

    def _shared(self) -> frozenset[tuple[int, int]]:
        """Return the pairs (module, fan-in) that several targets read in this pass."""
        reads: Counter[tuple[int, int]] = Counter()
        for target in filter(self.runs, self.layout.targets):
            reads_all = self.reads_all(target)
            fan_in = self.largest_fan_in if reads_all else self.masks.fan_in[target]
            if not reads_all or self.rows is not None:  # with a running sum, only masks need single sources
                reads.update((k, fan_in) for k in self.needed(target))
        return frozenset(read for read, count in reads.items() if count > 1)

    @property
    def always(self) -> tuple[int, ...]:
        """The extra input of every target: in a stream, the input of the stack."""
        return (INPUT,) if self.aggregation == "stream" else ()

    def needed(self, target: int) -> tuple[int, ...]:
        """Return the sources that a target needs: all candidates while masks learn, otherwise the active ones."""
        return self.candidates[target] if self.rows is not None else self.masks.sources[target]

    def runs(self, number: int) -> bool:
        """Return whether a module runs: every module while masks learn, otherwise those that reach the output."""
        return self.rows is not None or self.masks.alive[number]

    def first(self, x: Any, number: int) -> Any:
        """Return the input of the stack for a module of the first layer, which may change it in place."""
        alone = number == self.layout.layers[0][-1] and not self.always  # nothing reads it after this module
        return x if isinstance(self.aggregation, LayerAggregation) or alone else cloned(x)

    def reads_all(self, target: int) -> bool:
        """Return whether the input of a target is the running sum of all modules before it."""
        if not MIN_SOURCES <= target <= self.masks.fan_in[target] or self.layout.layered or callable(self.aggregation):
            return False
        if self.scales is not None or is_reference() or torch.compiler.is_compiling():
            return False
        every = tuple(range(target))
        return self.masks.sources[target] == every and (self.rows is None or self.candidates[target] == every)

    @property
    def largest_fan_in(self) -> int:
        """The fan-in with which pairs are joined for masks of targets that read a running sum; most targets have it."""
        return max(self.masks.fan_in)

    def sources(self, target: int, outputs: Outputs) -> Reading:
        """Return the outputs that a target needs, aligned."""
        if target not in self.layout.targets:
            return Reading()
        before, fan_in, reads_all = self.layout.before(target), self.masks.fan_in[target], self.reads_all(target)
        joined = self.largest_fan_in if reads_all else fan_in  # also if outputs turn out not to be addable
        if reads_all:
            sums = outputs.all_before(target, with_input=bool(self.always))
            if sums is not None:
                return Reading(sums=sums, seen=None if self.rows is None else self._seen(target, outputs, joined))
        read = self.needed(target) if self.reads_candidates else self.masks.sources[target]
        found = [outputs.source(k, before, fan_in, target) for k in (*self.always, *read)]
        if self.rows is None or self._by_autograd:
            return Reading(found)
        return Reading(found, seen=self._seen(target, outputs, joined))

    @property
    def reads_candidates(self) -> bool:
        """Whether a target needs all its candidates in the forward pass, not only for its mask gradient."""
        return self.rows is not None and (self._by_autograd or is_reference())

    @property
    def _by_autograd(self) -> bool:
        """Whether the join brings its own mask gradient."""
        return callable(self.aggregation) or self.scales is not None or torch.compiler.is_compiling()

    def _seen(self, target: int, outputs: Outputs, joined: int) -> Seen:
        """Return what a mask gradient uses of its candidates, whose pairs are joined for the fan-in `joined`."""
        before = self.layout.before(target)
        shape = outputs.shape_of(before)
        wholes = [outputs.candidate(k, before, joined, target) for k in self.candidates[target]]
        if shape is None:
            outputs.check_not_nested(self.candidates[target])
        more = 1 / self.masks.fan_in[target] - 1 / joined
        if not outputs.pairs or not more:
            return outputs.sampler.seen((1.0, wholes), shape=shape)
        shortcuts = [outputs.shortcut(k) for k in self.candidates[target]]
        return outputs.sampler.seen((1.0, wholes), (more, shortcuts), shape=shape)

    def one(self, target: int, reading: Reading) -> Any:
        """Return the input of a target from its sources."""
        if self.rows is not None:
            x, shared = self._masked(target, reading), True
        elif reading.sums is not None:
            divisor = divisor_of(str(self.aggregation), self.masks.fan_in[target])
            return self._activated(weighted(reading.sums, self._weights_of_sums(target), divisor), fresh=True)
        else:
            x, shared = self._active(reading.found, target), self.masks.readers[self.masks.sources[target][0]] > 1
        # A module may change its input in place, which must not affect other readers of a single source.
        return cloned(x) if shared and any(x is y for y in reading.found) else x

    def _weights_of_sums(self, target: int) -> list[float]:
        """Return the weight of the running sum; for pairs, the weight of the sum of each part."""
        return [1.0, 1 / self.masks.fan_in[target]] if self.aggregation == "residual" else [1.0]

    def _masked(self, target: int, reading: Reading) -> Any:
        """Return the aggregate of all candidates, with a gradient for the mask."""
        assert self.rows is not None
        row, sources = self.rows[target - self.layout.targets.start], reading.found
        read = set(self.masks.sources[target])
        active, blended = [k in read for k in self.candidates[target]], self.masks.fan_in[target] < len(read)
        if callable(self.aggregation):
            return self.aggregation([y if on else detached(y) for y, on in zip(sources, active, strict=True)], row)
        if (scale_S := self._scale(target)) is not None:
            return scaled_total(sources, scale_S * row) if blended else scaled_total(sources, scale_S, row, active)
        assert isinstance(self.aggregation, str)
        assert reading.seen is not None
        divisor = divisor_of(self.aggregation, self.masks.fan_in[target])
        if reading.sums is not None:
            weights = self._weights_of_sums(target)
            x = masked_total(row, reading.sums, divisor, reading.seen, self.credit, weights)
            return self._activated(x, fresh=True)
        always = len(self.always)
        if is_reference():
            row, active = torch.cat([row.new_ones(always), row]), [True] * always + active
            return self._activated(reference_total(row, active, divisor, sources, self.credit, reading.seen.stride))
        parts = [*[1.0] * always, *filter(None, self.shares[target])] if blended else None
        x = masked_total(row, sources, divisor, reading.seen, self.credit, parts)
        return self._activated(x, fresh=True)

    def _scale(self, target: int) -> Tensor | None:
        """Return the learned scales of the candidates of a target."""
        if self.scales is None:
            return None
        return self.scales[target - self.layout.targets.start, : len(self.candidates[target])]

    def _active(self, sources: list[Any], target: int | None = None) -> Any:
        """Return the aggregate of active sources; without a target, for the output of the stack."""
        if callable(self.aggregation):
            return self.aggregation(sources, self.real.new_ones(len(sources)))
        if target is not None and (scale_S := self._scale(target)) is not None:
            return scaled_total(sources, scale_S[active_places(self.candidates[target], self.masks.sources[target])])
        assert isinstance(self.aggregation, str)
        return self._activated(total(sources, divisor_of(self.aggregation, len(sources))))

    def _activated(self, x: Tensor, *, fresh: bool = False) -> Tensor:
        """Apply the ReLU that follows a join of residual blocks, in place if x is `fresh`; other joins have none."""
        if self.aggregation != "residual":
            return x
        return F.relu(x, inplace=fresh and not x.is_nested)


def active_places(candidates: Sequence[int], sources: Sequence[int]) -> list[int]:
    """Return the positions of `sources` in a row of candidates."""
    return [candidates.index(k) for k in sources]


def detached(y: Any) -> Any:
    """Return an output without its graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, y)


def cloned(y: Any) -> Any:
    """Return an output with a copy of every tensor in it."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, y)
