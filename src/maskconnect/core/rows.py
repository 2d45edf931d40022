"""Tensors of one shape as the rows of matrices, so that one operation reads many tensors.

Shape letters: R rows, P positions (all values of a tensor, in memory order).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Size, Tensor

ROWS_PER_BLOCK = 8
"""Rows per matrix: more rows need fewer operations, but may waste more memory."""


@dataclass(eq=False)
class Rows:
    """A growing list of tensors with the same shape and memory format."""

    shape: Size
    layout: torch.memory_format
    count: int = 0
    blocks: list[Tensor] = field(default_factory=list)  # each of shape [ROWS_PER_BLOCK, P]

    def append(self, y: Tensor) -> Tensor:
        """Copy y into the next row; return the copy."""
        if self.count % ROWS_PER_BLOCK == 0:
            self.blocks.append(y.new_empty(ROWS_PER_BLOCK, self.shape.numel()))
        self.count += 1
        return image_of(self.blocks[-1][(self.count - 1) % ROWS_PER_BLOCK], self.shape, self.layout).copy_(y)

    def products(self, a: Tensor, count: int) -> Tensor:
        """Return <a, y> for each of the first `count` tensors."""
        a_P = row_of(a, self.layout).to(self.blocks[0].dtype)
        return torch.cat([torch.mv(block_RP, a_P) for block_RP in self._first(count)])

    def join(self, weight_R: Tensor) -> Tensor:
        """Return the sum of the first tensors, each times a weight."""
        first_RP, *others = self._first(len(weight_R))
        x = torch.empty(self.shape, dtype=first_RP.dtype, device=first_RP.device, memory_format=self.layout)
        x_P = row_of(x, self.layout)
        torch.mv(first_RP.T, weight_R[:ROWS_PER_BLOCK], out=x_P)
        for i, block_RP in enumerate(others, start=1):
            x_P.addmv_(block_RP.T, weight_R[i * ROWS_PER_BLOCK : (i + 1) * ROWS_PER_BLOCK])
        return x

    def _first(self, count: int) -> list[Tensor]:
        """Return the blocks of the first `count` rows; the last block is cut."""
        whole, left = divmod(count, ROWS_PER_BLOCK)
        return [*self.blocks[:whole], *([self.blocks[whole][:left]] if left else [])]


def row_of(y: Tensor, layout: torch.memory_format) -> Tensor:
    """Return a tensor as a row in the order of this memory format; without a copy if it has this format."""
    return (y.permute(0, 2, 3, 1) if layout == torch.channels_last else y).reshape(-1)


def image_of(row_P: Tensor, shape: Size, layout: torch.memory_format) -> Tensor:
    """Return a row as a tensor of this shape, the inverse of `row_of`."""
    if layout != torch.channels_last:
        return row_P.view(shape)
    n, c, h, w = shape
    return row_P.view(n, h, w, c).permute(0, 3, 1, 2)


def fits(y: Tensor) -> bool:
    """Return whether matrix products of such tensors are fast and exact enough."""
    return type(y) is Tensor and y.dtype in (torch.float32, torch.float64) and not y.is_nested and y.dim() > 0
