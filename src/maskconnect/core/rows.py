"""Tensors of one shape as the rows of matrices, so that one operation reads many of them.

Shape letters: R rows, P positions (all numbers of a tensor, in the order in which they lie in memory).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Size, Tensor

from maskconnect.core.align import layout_of

TOGETHER = 8
"""Rows per matrix: more need fewer operations, and may leave more memory empty."""


@dataclass(eq=False)
class Rows:
    """A growing list of tensors; `layout` is how each of them lies in memory."""

    shape: Size
    layout: torch.memory_format
    count: int = 0
    blocks: list[Tensor] = field(default_factory=list)  # each of shape [TOGETHER, P]

    @classmethod
    def like(cls, y: Tensor) -> Rows:
        """For tensors like y."""
        return cls(y.shape, layout_of(y))

    def append(self, y: Tensor) -> None:
        """Copy y into the next row."""
        if self.count % TOGETHER == 0:
            self.blocks.append(y.new_empty(TOGETHER, self.shape.numel()))
        image_of(self.blocks[-1][self.count % TOGETHER], self.shape, self.layout).copy_(y)
        self.count += 1

    def products(self, a: Tensor, count: int) -> Tensor:
        """<a, y> of each of the first `count` tensors."""
        a_P = row_of(a, self.layout)
        return torch.cat([torch.mv(block_RP, a_P) for block_RP in self._first(count)])

    def join(self, weight_R: Tensor) -> Tensor:
        """The sum of the first tensors, each times a weight."""
        first_RP, *others = self._first(len(weight_R))
        x = torch.empty(self.shape, dtype=first_RP.dtype, device=first_RP.device, memory_format=self.layout)
        x_P = row_of(x, self.layout)
        torch.mv(first_RP.T, weight_R[:TOGETHER], out=x_P)
        for i, block_RP in enumerate(others, start=1):
            x_P.addmv_(block_RP.T, weight_R[i * TOGETHER : (i + 1) * TOGETHER])
        return x

    def _first(self, count: int) -> list[Tensor]:
        """The blocks of the first `count` rows, the last of them cut off."""
        whole, left = divmod(count, TOGETHER)
        return [*self.blocks[:whole], *([self.blocks[whole][:left]] if left else [])]


def row_of(y: Tensor, layout: torch.memory_format) -> Tensor:
    """A tensor as a row, its numbers in the order of this layout; without a copy if it lies in memory so."""
    return (y.permute(0, 2, 3, 1) if layout == torch.channels_last else y).reshape(-1)


def image_of(row_P: Tensor, shape: Size, layout: torch.memory_format) -> Tensor:
    """A row as a tensor of this shape: the inverse of `row_of`."""
    if layout != torch.channels_last:
        return row_P.view(shape)
    n, c, h, w = shape
    return row_P.view(n, h, w, c).permute(0, 3, 1, 2)


def fits(y: Tensor) -> bool:
    """Whether matrix products of such tensors are fast and exact enough."""
    return type(y) is Tensor and y.dtype in (torch.float32, torch.float64) and not y.is_nested and y.dim() > 0
