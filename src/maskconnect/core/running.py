"""The sum of the outputs of all modules so far, for targets that read all of them.

The first K targets of a chain read every module before them, and with fixed full connectivity all do. Their sums differ
by one output from one target to the next, so they take one addition each instead of one per source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor

from maskconnect.core.align import align, leads_through

LEAST = 3
"""From how many sources on it pays."""


@dataclass(eq=False)
class RunningSum:
    """The sum of the outputs of the first modules, in the shape of the latest; of pairs, one sum of each part."""

    count: int = 0  # how many modules it has
    parts: list[Tensor] = field(default_factory=list)
    shapes: list[Size] = field(default_factory=list)  # those that it has had
    possible: bool = True  # whether outputs are tensors that can be added so

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
            self._lead_to(shape)
        if self.possible:
            self.parts = [x + y for x, y in zip(self.parts, parts, strict=True)]

    def _lead_to(self, shape: Size) -> None:
        """Bring the sums into the shape of the next output, if that is the same as to bring each output there."""
        moved = [align(x, shape) for x in self.parts]
        self.possible = all(leads_through(old, self.shapes[-1], shape) for old in self.shapes[:-1])
        self.possible &= all(x is not None for x in moved)
        self.parts = [x for x in moved if x is not None]
        self.shapes.append(shape)


def _can_be_added(y: Any) -> bool:
    """A tensor with a shape; a sum in float16 may overflow."""
    return isinstance(y, Tensor) and not y.is_nested and y.dtype != torch.float16
