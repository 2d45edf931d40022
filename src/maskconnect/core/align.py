"""Parameter-free matching of shapes (section 3.2): subsampling with a stride, and zero padding of channels.

Shape letters: N batch, C channels; every further axis is spatial. Tensors with three axes are not aligned, because
they may be (batch, channels, length) or (batch, length, features): pass `align` for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional as F


def align(source: Tensor, shape: Size) -> Tensor | None:
    """Return `source` in the given shape; None if strides and channel padding cannot produce it."""
    if source.shape == shape:
        return source
    strides = _strides_between(source.shape, shape)
    return None if strides is None else subsampled(source, strides, shape[1] - source.shape[1])


def can_align(found: Size, wanted: Size) -> bool:
    """Return whether `align` can bring a tensor from one shape into another."""
    return found == wanted or _strides_between(found, wanted) is not None


def align_nhwc(source: Tensor, shape: Size) -> Tensor | None:
    """Align like `align`, for tensors whose channels are the last axis."""
    if source.dim() != len(shape) or source.dim() < 4:
        return None
    wanted = Size((shape[0], shape[-1], *shape[1:-1]))
    found = align(source.movedim(-1, 1), wanted)
    return None if found is None else found.movedim(1, -1)


ALIGNS = {"nhwc": align_nhwc}
"""The values of the argument `align` that are names."""


def aligns_via(found: Size, middle: Size, wanted: Size) -> bool:
    """Return whether aligning `found` to `middle`, then to `wanted`, gives the same as aligning it directly."""
    if not len(found) == len(middle) == len(wanted) > 3 or middle[1] > wanted[1]:
        return False
    steps = zip(_strides(found, middle), _strides(middle, wanted), _strides(found, wanted), strict=True)
    return all(first * second == direct > 0 for first, second, direct in steps)


def _strides_between(found: Size, wanted: Size) -> list[int] | None:
    """Return the strides of an alignment; None if it is impossible."""
    if len(found) != len(wanted) or len(found) in (0, 1, 3) or found[0] != wanted[0] or found[1] > wanted[1]:
        return None
    strides = _strides(found, wanted)
    return None if 0 in strides else strides


def _strides(found: Size, wanted: Size) -> list[int]:
    return [_stride(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)]


def subsampled(source: Tensor, strides: Sequence[int], extra: int) -> Tensor:
    """Return every stride-th position along each spatial axis, with `extra` more channels of zeros."""
    plain = not isinstance(source, Tensor) or torch.compiler.is_compiling()  # the network is being traced or compiled
    if not plain and torch.is_grad_enabled() and source.requires_grad:
        y: Tensor = _Subsampled.apply(source, tuple(strides), extra)  # type: ignore[no-untyped-call]
        return y
    return _subsampled(source, strides, extra)


def _subsampled(source: Tensor, strides: Sequence[int], extra: int) -> Tensor:
    y = source[_places(strides)]
    return F.pad(y, [0, 0] * len(strides) + [0, extra]) if extra else y


def _places(strides: Sequence[int]) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(None, None, stride) for stride in strides))


class _Subsampled(torch.autograd.Function):
    """Subsample with a gradient in the memory layout of the source, unlike slicing in torch.

    Sums of gradients in different layouts are several times slower.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, strides: tuple[int, ...], extra: int) -> Tensor:
        ctx.like = source.shape, _dense_strides(source), strides
        y = _subsampled(source, strides, extra)
        return y if extra else y.contiguous(memory_format=layout_of(source))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, layout, strides = ctx.like
        found = gradient.new_empty_strided(shape, layout).zero_()
        found[_places(strides)] = gradient[:, : shape[1]]
        return found, None, None


def _dense_strides(y: Tensor) -> tuple[int, ...]:
    """Return the strides of y in memory; if y is expanded, those of a copy."""
    expanded = any(not step and length > 1 for step, length in zip(y.stride(), y.shape, strict=True))
    return torch.empty(y.shape, device="meta").stride() if expanded else y.stride()


def layout_of(y: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: channels last, or contiguous for all others."""
    last = y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _stride(found: int, wanted: int) -> int:
    """Return a stride that keeps `wanted` of `found` positions; 0 if there is none.

    Powers of two are preferred, because several layers of stride 2 have the same effect.
    """
    if not wanted:
        return 0
    powers = (2**k for k in range(20))
    return next((s for s in (*powers, -(-found // wanted)) if -(-found // s) == wanted), 0)
