"""The inputs of a whole layer by one matrix product: the fast path for blended masks (Eq. 1).

While masks are blended, every target of a layer reads every branch of the layer before. With the branches as the rows
of a matrix Y and the masks as a matrix M, all inputs are X = M Y, and the gradients are products too:

    dl/dM = G Y^T      dl/dY = M^T G      G = dl/dX

So every branch is read once, and not once per target. `aggregate.py` has the formulas for one target. If mask
gradients use a sample of the batch (`credit.py`), dl/dM uses only these images, and only these are kept.

Shape letters: T targets, S sources, P positions (all numbers of an output).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Size, Tensor

from maskconnect.core.align import layout_of
from maskconnect.core.credit import Sampler, sampled
from maskconnect.core.host import on_device
from maskconnect.core.reference import first_order, is_reference
from maskconnect.core.rows import image_of, row_of


def mixes(sources: Sequence[Any]) -> bool:
    """Return whether these outputs can be rows of a matrix."""
    if is_reference() or torch.compiler.is_compiling() or len(sources) < 2:
        return False
    first = sources[0]
    return type(first) is Tensor and all(
        type(y) is Tensor
        and y.dtype == first.dtype in (torch.float32, torch.float64)
        and y.shape == first.shape
        and y.device == first.device
        and not y.is_nested
        for y in sources
    )


def mixture(
    mask_TS: Tensor, divisor_T: Sequence[float], credit: str, sources: Sequence[Tensor], sampler: Sampler
) -> tuple[Tensor, ...]:
    """Return the input of each target: the sum of all sources, each times its mask entry, divided."""
    stride = sampler.stride(sources[0])
    seen = tuple(sampled(y, stride).clone() if stride > 1 else y.detach() for y in sources)
    with without_autocast(sources[0].device.type):  # the product has the dtype of the sources
        made: tuple[Tensor, ...] = _Mixture.apply(mask_TS, tuple(divisor_T), credit, stride, seen, *sources)  # type: ignore[no-untyped-call]
    return made


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Turn autocast off for a kind of device; the meta device has none."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask_TS: Tensor,
        divisor_T: tuple[float, ...],
        credit: str,
        stride: int,
        seen: tuple[Tensor, ...],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.divisor_T1 = on_device(torch.tensor(divisor_T, dtype=mask_TS.dtype, device="cpu")[:, None], mask_TS.device)
        ctx.credit, ctx.stride, ctx.layout = credit, stride, layout_of(sources[0])
        ctx.like = sources[0].shape, sources[0].dtype
        ctx.save_for_backward(mask_TS, *seen)
        ctx.set_materialize_grads(False)
        weight_TS = (mask_TS / ctx.divisor_T1).to(sources[0].dtype)
        made = _images(weight_TS @ _rows(sources, ctx.layout), sources[0].shape, ctx.layout)
        return tuple(x.data for x in made)  # not views of one tensor, so that a branch may change its input in place

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        mask_TS, *seen = ctx.saved_tensors
        shape, dtype = ctx.like
        all_grads = [mask_TS.new_zeros(shape, dtype=dtype) if grad is None else grad for grad in grads]
        grad_TP = _rows(all_grads, ctx.layout)
        weight_TS = (mask_TS / ctx.divisor_T1).to(dtype)
        grad_TS = None
        if ctx.needs_input_grad[0]:
            seen_SP = _rows(seen, ctx.layout)
            seen_TP = grad_TP if ctx.stride == 1 else _rows([grad[:: ctx.stride] for grad in all_grads], ctx.layout)
            grad_TS = (seen_TP @ seen_SP.T).to(mask_TS.dtype) / ctx.divisor_T1
            if ctx.credit == "new":  # without the component along the input
                x_TP = weight_TS @ seen_SP
                along_T1 = (x_TP * seen_TP).sum(dim=1, keepdim=True) / ctx.divisor_T1
                length_T1 = x_TP.square().sum(dim=1, keepdim=True).clamp_min_(torch.finfo(dtype).tiny)
                grad_TS -= (along_T1 / length_T1) * (x_TP @ seen_SP.T)
            grad_TS *= grad_TP.shape[1] / seen_TP.shape[1]
        back = _images(weight_TS.T @ grad_TP, shape, ctx.layout)
        needed = ctx.needs_input_grad[5:]
        unneeded = (None, None, None, None)
        return grad_TS, *unneeded, *(grad if needs else None for grad, needs in zip(back, needed, strict=True))


def _rows(tensors: Sequence[Tensor], layout: torch.memory_format) -> Tensor:
    """Return tensors as the rows of a matrix."""
    return torch.stack([row_of(y, layout) for y in tensors])


def _images(matrix: Tensor, shape: Size, layout: torch.memory_format) -> tuple[Tensor, ...]:
    """Return the rows of a matrix as tensors of this shape."""
    return tuple(image_of(row, shape, layout) for row in matrix)
