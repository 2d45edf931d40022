"""An aggregation that makes the inputs of a whole layer at once (section 3.5).

The branches of a layer may share something that depends on all of them, such as the statistics of a batch norm,
and then no target's input can be made before every source is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maskconnect.core.aggregate import masked_total, readable_total, total
from maskconnect.core.credit import Sampler
from maskconnect.core.reference import is_reference


@dataclass(frozen=True, eq=False)
class Reader:
    """One target, or the output of the stack: what it may read of the layer before, and what it reads in this pass."""

    candidates: tuple[int, ...]  # branches of the layer before
    active: tuple[bool, ...]  # which of its candidates
    mask_S: Tensor | None  # the same with a gradient, while masks are learned
    fan_in: int  # K_j: how many are active, or what their shares add up to
    alive: bool  # whether it can reach the output
    weights: tuple[float, ...] | None = None  # of the active ones, where masks are blended

    def total(self, outputs: Mapping[int, Tensor], divisor: int = 1) -> Tensor:
        """The sum of the outputs that it reads, divided; through it the mask learns from all candidates (Eq. 1)."""
        if self.mask_S is not None:
            sources = [outputs[k] for k in self.candidates]
            if is_reference():
                return readable_total(self.mask_S, self.active, divisor, sources, "whole")
            read = [y for y, on in zip(sources, self.active, strict=True) if on]
            return masked_total(self.mask_S, read, divisor, Sampler().seen((1.0, sources)), weights=self.weights)
        read = [outputs[k] for k, on in zip(self.candidates, self.active, strict=True) if on]
        return total(read, divisor)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer in a forward pass."""

    branches: Mapping[int, nn.Module]  # those that run, by number: all while masks are learned, else the alive
    alive: frozenset[int]  # which branches can reach the output
    readers: Sequence[Reader]  # those of its readers that run; of the last layer, the output of the stack


class LayerAggregation(nn.Module, ABC):
    """The `aggregation` of a layered stack whose branches share something.

    Branches under it never change their input in place: the readers of one source may be given one tensor.
    """

    @abstractmethod
    def forward(self, layer: int, outputs: Mapping[int, Any], alive: set[int], readers: Sequence[Reader]) -> list[Any]:
        """The input of every reader.

        Args:
            layer: the number of the layer that is read.
            outputs: what its branches have returned, by branch; all of them while masks are learned, else the alive.
            alive: which branches can reach the output.
            readers: those that need an input, in order.
        """

    def at_once(self, layers: Sequence[Layer], x: Any) -> Any | None:
        """The output of the whole stack in a faster way; None where there is none, and every branch runs by itself."""
        return None

    @abstractmethod
    def plain(self, layer: int, outputs: Mapping[int, Any], rows: Sequence[tuple[int, ...]]) -> list[Any]:
        """The input of readers of a frozen stack in eval mode, in operations that `torch.fx` can trace.

        Args:
            layer: the number of the layer that is read.
            outputs: what those of its branches have returned that can reach the output, by branch.
            rows: which branches each reader reads; no two are the same.
        """
