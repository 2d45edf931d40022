"""Eq. 1: the input of a target from the outputs of its active sources, and the gradient by its mask.

Shape letters: T targets, S candidate sources; x_j is the input of target j, y_k the (aligned) output of source k.

    sum    x_j = sum_k m_jk y_k              dl/dm_jk = <dl/dx_j, y_k>
    mean   x_j = (1/K_j) sum_k m_jk y_k      dl/dm_jk = (1/K_j) <dl/dx_j, y_k>       K_j a constant (D1)
    scaled x_j = sum_k m_jk a_jk y_k         dl/dm_jk = a_jk <dl/dx_j, y_k>          a_jk learned, initially 1/K_j
    residual   the sum of the y_k that `residual.py` builds from a residual and a shortcut; a ReLU follows
    stream     the sum plus the input of the stack, which every target reads; the output reads all modules

The gradient by the mask is taken at *every* candidate, active or not. The sum runs over the active ones only, so an
inactive source is not read in the forward pass and receives no gradient.

Part of that gradient only says that x_j should be smaller or larger: for sources that point in the direction of x_j, it
is proportional to their length. `credit="new"` leaves this part out and counts y_k without its component along x_j:

    dl/dm_jk = (1/K_j) <dl/dx_j, y_k - (<y_k, x_j> / <x_j, x_j>) x_j>
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from maskconnect.core.align import layout_of
from maskconnect.core.credit import Seen, inner_products
from maskconnect.core.host import copy_from_host_
from maskconnect.core.reference import first_order, is_reference


def divisor_of(aggregation: str, sources: int) -> float:
    """Return the divisor of a sum of sources; for "scaled", that of the output of layers, which has no scales."""
    return {"mean": sources, "sum": 1, "residual": 1, "stream": 1, "scaled": sources}[aggregation]


def total(sources: Sequence[Tensor], divisor: float) -> Tensor:
    """Return the sum of `sources`, divided by `divisor` (at least 1); a single source is returned unchanged."""
    first, *others = sources
    if not others:
        return first
    dtype, wide = _dtypes(sources)
    x = first.to(wide) + others[0]
    for y in others[1:]:
        x += y
    if divisor > 1:
        x = x / divisor if x.is_nested else x.div_(divisor)
    return x.to(dtype)


def scaled_total(
    sources: Sequence[Tensor], scale_S: Tensor, mask_S: Tensor | None = None, active: Sequence[bool] | None = None
) -> Tensor:
    """Return the sum of `sources`, each times a learned scale; with a mask, the sum of the active ones."""
    active = [True] * len(sources) if active is None else active
    if is_reference() or torch.compiler.is_compiling():
        factor_S = scale_S if mask_S is None else scale_S * mask_S
        given = [y if on else y.detach() for y, on in zip(sources, active, strict=True)]
        readable: Tensor = reduce(torch.add, [a * y for a, y in zip(factor_S, given, strict=True)])
        return readable
    x: Tensor = _ScaledTotal.apply(mask_S, scale_S, tuple(active), *sources)  # type: ignore[no-untyped-call]
    return x


def masked_total(
    mask_S: Tensor,
    sources: Sequence[Tensor],
    divisor: float,
    seen: Seen,
    credit: str = "whole",
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Return `total` of the sources that are read, with a gradient for every entry of the mask.

    Args:
        mask_S: one entry per candidate.
        sources: the sources that are read.
        divisor: the divisor of their sum.
        seen: what the mask gradient uses of all candidates.
        credit: "whole" or "new".
        weights: the weights of the sources if masks are blended; None if every weight is 1.
    """
    given = None if weights is None else tuple(weights)
    x: Tensor = _MaskedTotal.apply(mask_S, divisor, seen, credit, given, *sources)  # type: ignore[no-untyped-call]
    return x


def reference_total(
    mask_S: Tensor, active: Sequence[bool], divisor: float, sources: Sequence[Tensor], credit: str, stride: int = 1
) -> Tensor:
    """Return Eq. 1 literally: every source times its mask entry; a source that is not finite spoils x even at 0."""
    sources = [y if on else y.detach() for y, on in zip(sources, active, strict=True)]
    masks = [_seen_by(m, stride, sources[0]) for m in mask_S]
    x: Tensor = reduce(torch.add, [m * y for m, y in zip(masks, sources, strict=True)]) / divisor
    return without_credit_along(x, masks, sources, divisor, stride) if credit == "new" else x


def without_credit_along(
    x: Tensor, masks: Sequence[Tensor], sources: Sequence[Tensor], divisor: float, stride: int = 1
) -> Tensor:
    """Return x itself; its gradient by the mask counts only what is new in each source (`credit="new"`)."""
    seen = x.detach()[::stride] if stride > 1 else x.detach()
    length = seen.square().sum().clamp_min(torch.finfo(seen.dtype).tiny)
    parts = [y.detach()[::stride] if stride > 1 else y.detach() for y in sources]
    along = [m * (y * seen).sum() for m, y in zip(masks, parts, strict=True)]
    share: Tensor = reduce(torch.add, along) / (divisor * length)
    return x - (share - share.detach()) * x.detach()


def _seen_by(m: Tensor, stride: int, like: Tensor) -> Tensor:
    """Return a mask entry as one factor per image; only every stride-th has a gradient, scaled up to the batch."""
    if stride == 1:
        return m
    batch = len(like)
    factor = torch.zeros(batch, dtype=m.dtype, device=like.device)
    factor[::stride] = batch / -(-batch // stride)
    return (m.detach() + factor * (m - m.detach())).view(-1, *[1] * (like.dim() - 1))


class _MaskedTotal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask_S: Tensor,
        divisor: float,
        seen: Seen,
        credit: str,
        weights: tuple[float, ...] | None,
        *sources: Tensor,
    ) -> Tensor:
        ctx.divisor, ctx.seen, ctx.credit, ctx.weights = divisor, seen.holding([]), credit, weights
        ctx.dtypes, ctx.layout = [y.dtype for y in sources], layout_of(sources[0])
        ctx.save_for_backward(mask_S, *(seen.tensors() if ctx.needs_input_grad[0] else ()))
        if weights is None:
            x = total(sources, divisor)
            return x.clone() if any(x is y for y in sources) else x
        return weighted(sources, weights, divisor)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        mask_S, *seen = ctx.saved_tensors
        grad_x = grad_x / ctx.divisor if ctx.divisor > 1 else grad_x
        if grad_x.dim() == 4:  # sums of gradients in different layouts are several times slower
            grad_x = grad_x.contiguous(memory_format=ctx.layout)
        grad_S = None
        if ctx.needs_input_grad[0]:
            grad_S = ctx.seen.holding(seen).gradient(grad_x, mask_S, ctx.divisor, ctx.credit)
        weights = ctx.weights or [1.0] * len(ctx.dtypes)
        wanted = zip(ctx.dtypes, weights, ctx.needs_input_grad[5:], strict=True)
        grads = (_as(grad_x if w == 1 else grad_x * w, dtype) if needs else None for dtype, w, needs in wanted)
        return grad_S, None, None, None, None, *grads


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


class _ScaledTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask_S: Tensor | None, scale_S: Tensor, active: tuple[bool, ...], *sources: Tensor) -> Tensor:
        ctx.active = active
        ctx.save_for_backward(scale_S, *sources)
        return _weighted([(a, y) for a, y, on in zip(scale_S, sources, ctx.active, strict=True) if on])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        scale_S, *sources = ctx.saved_tensors
        if grad_x.dim() == 4:
            grad_x = grad_x.contiguous(memory_format=layout_of(sources[0]))
        learning = ctx.needs_input_grad[0]
        needed = [y for y, on in zip(sources, ctx.active, strict=True) if on or learning]
        products, zero = iter(inner_products(grad_x, needed)), scale_S.new_zeros(())
        found = [next(products).to(scale_S.dtype) if on or learning else zero for on in ctx.active]
        wanted = zip(scale_S, sources, ctx.active, ctx.needs_input_grad[3:], strict=True)
        return (
            scale_S * torch.stack(found) if learning else None,
            torch.stack([product if on else zero for product, on in zip(found, ctx.active, strict=True)]),
            None,
            *(grad_x * a.to(y.dtype) if on and needs else None for a, y, on, needs in wanted),
        )


def weighted(sources: Sequence[Tensor], weights: Sequence[float], divisor: float = 1) -> Tensor:
    """Return the sum of `sources`, each times a number, divided by `divisor`; always a new tensor."""
    dtype, wide = _dtypes(sources)
    first, *others = (y.to(wide) for y in sources)
    if not others and weights[0] == 1 and divisor > 1:
        return (first / divisor).to(dtype)
    if others and weights[0] == 1:
        x, left = torch.add(first, others[0], alpha=weights[1]), 2
    else:
        x, left = first * weights[0], 1
    for y, w in zip(others[left - 1 :], weights[left:], strict=True):
        x = torch.add(x, y, alpha=w) if x.is_nested else x.add_(y, alpha=w)
    return (x / divisor if divisor > 1 else x).to(dtype)


def _weighted(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of tensors, each times a scalar tensor."""
    (a, y), *others = terms
    dtype, wide = _dtypes([y for _, y in terms])
    x: Tensor = y.to(wide) * a.to(wide)
    for a, y in others:
        x.addcmul_(y.to(wide), a.to(wide))
    return x.to(dtype)


def _dtypes(sources: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of a sum, and the dtype to add in: a sum in float16 may overflow."""
    dtype = reduce(torch.promote_types, (y.dtype for y in sources))
    return dtype, torch.float32 if dtype == torch.float16 else dtype


def with_zero_gradient(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return a copy of x that gives `parameters` a gradient of zero instead of None (D14)."""
    y: Tensor = _ZeroGradient.apply(x, *parameters)  # type: ignore[no-untyped-call]
    return y


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters  # only their shapes are used: the optimizer may change the values
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, ...]:
        return grad_x, *map(torch.zeros_like, ctx.parameters)


def straight_through(real_TS: Tensor, mask_TS: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the binary mask of each target without padding; its gradient goes to the real mask unchanged."""
    rows: tuple[Tensor, ...] = _StraightThrough.apply(real_TS, mask_TS, sizes)  # type: ignore[no-untyped-call]
    return rows


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, real_TS: Tensor, mask_TS: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.shape = sizes, real_TS.shape
        ctx.set_materialize_grads(False)
        on_device_TS = copy_from_host_(torch.empty_like(real_TS), mask_TS)
        return tuple(row[:size] for row, size in zip(on_device_TS.unbind(), sizes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None
        grad_TS = given.new_zeros(ctx.shape)
        for row, grad, size in zip(grad_TS, grads, ctx.sizes, strict=True):
            if grad is not None:
                row[:size] = grad
        return grad_TS, None, None
