"""An aggregation that computes the inputs of a whole layer at once (section 3.5).

The branches of a layer may share something that depends on all of them, such as the statistics of a batch norm. Then
the input of a target needs the outputs of all branches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maskconnect.core.aggregate import masked_total, reference_total, total
from maskconnect.core.credit import Sampler
from maskconnect.core.reference import is_reference


@dataclass(frozen=True, eq=False)
class Reader:
    """One target, or the output of the stack: what it may read of the layer before, and what it reads in this pass."""

    candidates: tuple[int, ...]  # branches of the layer before
    active: tuple[bool, ...]  # which of its candidates
    mask_S: Tensor | None  # the mask with a gradient, while masks are learned
    fan_in: int  # K_j: the number of active sources, or the sum of their shares
    alive: bool  # whether it can reach the output
    weights: tuple[float, ...] | None = None  # of the active sources, if masks are blended

    def total(self, outputs: Mapping[int, Tensor], divisor: int = 1) -> Tensor:
        """Return the sum of the outputs that it reads, divided, with a mask gradient for all candidates (Eq. 1)."""
        if self.mask_S is not None:
            sources = [outputs[k] for k in self.candidates]
            if is_reference():
                return reference_total(self.mask_S, self.active, divisor, sources, "whole")
            read = [y for y, on in zip(sources, self.active, strict=True) if on]
            return masked_total(
                self.mask_S, read, divisor, Sampler().seen((1.0, list(enumerate(sources)))), weights=self.weights
            )
        read = [outputs[k] for k, on in zip(self.candidates, self.active, strict=True) if on]
        return total(read, divisor)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer in a forward pass."""

    branches: Mapping[int, nn.Module]  # that run, by number: all while masks are learned, otherwise the alive ones
    alive: frozenset[int]  # which branches can reach the output
    readers: Sequence[Reader]  # readers that run; for the last layer, the output of the stack


class LayerAggregation(nn.Module, ABC):
    """Base class of the `aggregation` of a layered stack whose branches share something.

    Its branches must not change their input in place, because several readers may get the same tensor.
    """

    @abstractmethod
    def forward(self, layer: int, outputs: Mapping[int, Any], alive: set[int], readers: Sequence[Reader]) -> list[Any]:
        """Return the input of every reader.

        Args:
            layer: the number of the layer that is read.
            outputs: the outputs of its branches, by branch; of all while masks are learned, otherwise of alive ones.
            alive: the branches that can reach the output.
            readers: the readers that need an input, in order.
        """

    def at_once(self, layers: Sequence[Layer], x: Any) -> Any | None:
        """Return the output of the whole stack by a fast path; None to run branch by branch."""
        return None

    @abstractmethod
    def plain(self, layer: int, outputs: Mapping[int, Any], rows: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return the inputs of readers of a frozen stack in eval mode, in operations that `torch.fx` can trace.

        Args:
            layer: the number of the layer that is read.
            outputs: the outputs of its alive branches, by branch.
            rows: the branches that each reader reads; all rows are different.
        """
