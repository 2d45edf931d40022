"""Eq. 1 for `torch.compile`: every module runs, and a target reads all candidates, each times its mask entry.

    x_j = (1/divisor) sum_k m_jk y_k        dl/dm_jk = (1/divisor) <dl/dx_j, y_k>        dl/dy_k = sum_j m_jk dl/dx_j

An inactive source is multiplied by 0, so it adds nothing and its gradient is zero. The graph is therefore the same for
all draws, and the compiler fuses the sums. Masks are tensors that an operator returns in each pass (`operators.py`).
The wiring of a frozen stack is part of its graph instead.

Shape letters: T targets, S candidate sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from maskconnect.core import operators
from maskconnect.core.aggregate import divisor_of, without_credit_along
from maskconnect.core.inputs import Inputs
from maskconnect.core.layers import LayerAggregation
from maskconnect.core.targets import Reading

if TYPE_CHECKING:
    from maskconnect.core.stack import MaskedStack


def compiles_whole(stack: MaskedStack) -> bool:
    """Return whether a traced pass reads all candidates: not if masks are frozen, and not for export.

    Also not if branches share something that depends on which of them are alive, as the norms of ResNeXt do.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return not stack.masks.is_frozen and not isinstance(stack.aggregation, LayerAggregation)


def compiled_inputs(stack: MaskedStack) -> CompiledInputs:
    """Begin a forward pass: draw masks, or take the top-K in eval mode, with an operator."""
    masks = stack.masks
    real_TS = masks.real.detach()
    if stack.training:
        mask_TS = operators.draw(real_TS, masks.binary, masks.handle)
        mask_TS = mask_TS + (masks.real - masks.real.detach())  # adds zero, but passes the gradient to the real masks
    else:
        mask_TS = operators.top(real_TS, masks.handle)
    return CompiledInputs(
        layout=stack.layout,
        candidates=masks.candidates,
        masks=masks.every,
        real=masks.real,
        rows=tuple(
            row[: len(masks.candidates[j])] for j, row in zip(stack.layout.targets, mask_TS.unbind(), strict=True)
        ),
        aggregation=stack.aggregation,
        credit=masks.how.credit,
        scales=stack.scales,
    )


class CompiledInputs(Inputs):
    """Computes the inputs of modules in a pass that a compiler traces."""

    def _masked(self, target: int, reading: Reading) -> Any:
        """Return the aggregate of all candidates, with a gradient for the mask."""
        assert self.rows is not None
        row, sources = self.rows[target - self.layout.targets.start], reading.found
        entries = list(row.unbind())
        if callable(self.aggregation):
            used = [_without_gradient_of_unused(y, m) for y, m in zip(sources, entries, strict=True)]
            return self.aggregation(used, row)
        scale_S = self._scale(target)
        if scale_S is not None:
            return weighted_sum([m * a for m, a in zip(entries, scale_S.unbind(), strict=True)], sources)
        assert isinstance(self.aggregation, str)
        divisor = divisor_of(self.aggregation, self.masks.fan_in[target])
        entries = [entries[0].new_ones(())] * len(self.always) + entries
        return self._activated(weighted_sum(entries, sources, divisor, self.credit))


def weighted_sum(
    entries: Sequence[Tensor], sources: Sequence[Tensor], divisor: float = 1, credit: str = "whole"
) -> Tensor:
    """Return the sum of all sources, each times its mask entry, divided by `divisor`; in float32 at least.

    Without gradients, a source with a mask entry of 0 may even be infinite.
    """
    dtype = reduce(torch.promote_types, (y.dtype for y in sources))
    wide = torch.promote_types(dtype, torch.float32)
    sources = [y.to(wide) for y in sources]
    if not torch.is_grad_enabled():
        sources = [torch.where(m != 0, y, 0) for m, y in zip(entries, sources, strict=True)]
    x: Tensor = reduce(torch.add, [m * y for m, y in zip(entries, sources, strict=True)]) / divisor
    if credit == "new" and torch.is_grad_enabled():
        x = without_credit_along(x, entries, sources, divisor)
    return x.to(dtype)


def _without_gradient_of_unused(y: Any, m: Tensor) -> Any:
    """Return y without a gradient if its mask entry is 0, for any aggregation."""
    return tree_map(lambda leaf: torch.where(m != 0, leaf, leaf.detach()) if isinstance(leaf, Tensor) else leaf, y)
