"""Parameter-free matching of shapes (section 3.2): subsampling by a stride, and channels padded with zeros.

Shape letters: N batch, C channels; every further axis is spatial. Tensors of three axes are left alone: whether
they are (batch, channels, length) or (batch, length, features) is for the user to say.
"""

from __future__ import annotations

from torch import Size, Tensor
from torch.nn import functional as F


def align(source: Tensor, shape: Size) -> Tensor | None:
    """`source` in the given shape, or None where no stride and no padding of channels leads there."""
    if source.shape == shape:
        return source
    if source.dim() != len(shape) or source.dim() in (0, 1, 3) or source.shape[0] != shape[0]:
        return None
    strides = [_stride(found, wanted) for found, wanted in zip(source.shape[2:], shape[2:], strict=True)]
    extra = shape[1] - source.shape[1]
    if extra < 0 or 0 in strides:
        return None
    subsampled = source[(slice(None), slice(None), *(slice(None, None, stride) for stride in strides))]
    return F.pad(subsampled, [0, 0] * len(strides) + [0, extra]) if extra else subsampled


def _stride(found: int, wanted: int) -> int:
    """A stride that leaves `wanted` of `found` positions, or 0 where there is none.

    A power of two where one does, because that is what several layers of stride 2 in between amount to.
    """
    if not wanted:
        return 0
    powers = (2**k for k in range(20))
    return next((s for s in (*powers, -(-found // wanted)) if -(-found // s) == wanted), 0)
