"""The running sum of the outputs of all modules, for targets that read all modules before them.

These are the first K targets of a chain, or all targets with full connectivity. The sums of consecutive targets differ
by one output, so each sum needs one addition instead of one per source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor

from maskconnect.core.align import align, aligns_via

MIN_SOURCES = 3
"""The number of sources from which on a running sum is faster."""


@dataclass(eq=False)
class RunningSum:
    """The sum of the outputs of the first modules, in the shape of the latest; pairs have one sum per part."""

    count: int = 0  # the number of modules in the sum
    parts: list[Tensor] = field(default_factory=list)
    shapes: list[Size] = field(default_factory=list)  # the shapes that the sum has had
    possible: bool = True  # whether outputs are tensors that can be added

    def add(self, parts: tuple[Any, ...]) -> None:
        """Add an output."""
        self.possible &= all(map(_can_be_added, parts))
        if not self.possible:
            return
        shape: Size = parts[0].shape
        if not self.parts:
            self.parts, self.shapes = list(parts), [shape]
            return
        if shape != self.shapes[-1]:
            self._align_to(shape)
        if self.possible:
            self.parts = [x + y for x, y in zip(self.parts, parts, strict=True)]

    def _align_to(self, shape: Size) -> None:
        """Align the sums to the next output, if this equals aligning each output directly."""
        moved = [align(x, shape) for x in self.parts]
        self.possible = all(aligns_via(old, self.shapes[-1], shape) for old in self.shapes[:-1])
        self.possible &= all(x is not None for x in moved)
        self.parts = [x for x in moved if x is not None]
        self.shapes.append(shape)


def _can_be_added(y: Any) -> bool:
    """Return whether y is a tensor with a shape, and not in float16, in which sums may overflow."""
    return isinstance(y, Tensor) and not y.is_nested and y.dtype != torch.float16
