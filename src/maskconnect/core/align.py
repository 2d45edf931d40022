"""Parameter-free matching of shapes (section 3.2): subsampling by a stride, and channels padded with zeros.

Shape letters: N batch, C channels; every further axis is spatial. Tensors of three axes are left alone: whether
they are (batch, channels, length) or (batch, length, features) is for the user to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional as F


def align(source: Tensor, shape: Size) -> Tensor | None:
    """`source` in the given shape, or None where no stride and no padding of channels leads there."""
    if source.shape == shape:
        return source
    if source.dim() != len(shape) or source.dim() in (0, 1, 3) or source.shape[0] != shape[0]:
        return None
    strides = _strides(source.shape, shape)
    extra = shape[1] - source.shape[1]
    if extra < 0 or 0 in strides:
        return None
    return subsampled(source, strides, extra)


def align_nhwc(source: Tensor, shape: Size) -> Tensor | None:
    """The same, for tensors whose channels are the last axis."""
    if source.dim() != len(shape) or source.dim() < 4:
        return None
    wanted = Size((shape[0], shape[-1], *shape[1:-1]))
    found = align(source.movedim(-1, 1), wanted)
    return None if found is None else found.movedim(1, -1)


ALIGNS = {"nhwc": align_nhwc}
"""Ways to align that have a name."""


def leads_through(found: Size, middle: Size, wanted: Size) -> bool:
    """Whether `align` gives the same by way of a shape that it has led to already."""
    if not len(found) == len(middle) == len(wanted) > 3 or middle[1] > wanted[1]:
        return False
    steps = zip(_strides(found, middle), _strides(middle, wanted), _strides(found, wanted), strict=True)
    return all(first * second == direct > 0 for first, second, direct in steps)


def _strides(found: Size, wanted: Size) -> list[int]:
    return [_stride(a, b) for a, b in zip(found[2:], wanted[2:], strict=True)]


def subsampled(source: Tensor, strides: Sequence[int], extra: int) -> Tensor:
    """Every stride-th position along each spatial axis, and so many more channels, of zeros."""
    plain = not isinstance(source, Tensor) or torch.compiler.is_compiling()  # a network is being traced, or compiled
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
    """The same; backward the gradient has the memory layout of the source, as torch's own would not.

    Sums of gradients in different layouts cost several times as much.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, strides: tuple[int, ...], extra: int) -> Tensor:
        ctx.like = source.shape, _strides_of_its_own(source), strides
        y = _subsampled(source, strides, extra)
        return y if extra else y.contiguous(memory_format=layout_of(source))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, layout, strides = ctx.like
        found = gradient.new_empty_strided(shape, layout).zero_()
        found[_places(strides)] = gradient[:, : shape[1]]
        return found, None, None


def _strides_of_its_own(y: Tensor) -> tuple[int, ...]:
    """How y lies in memory; if it is expanded, as a copy of it would."""
    expanded = any(not step and length > 1 for step, length in zip(y.stride(), y.shape, strict=True))
    return torch.empty(y.shape, device="meta").stride() if expanded else y.stride()


def layout_of(y: Tensor) -> torch.memory_format:
    """In which order its numbers lie in memory: channels last, if that is so, else the usual one."""
    last = y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _stride(found: int, wanted: int) -> int:
    """A stride that leaves `wanted` of `found` positions, or 0 where there is none.

    A power of two where one does, because that is what several layers of stride 2 in between amount to.
    """
    if not wanted:
        return 0
    powers = (2**k for k in range(20))
    return next((s for s in (*powers, -(-found // wanted)) if -(-found // s) == wanted), 0)
