"""Products of weights with wide tensors, for a few images at a time.

Shape letters: B images at a time, C branches, V rows, P pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

IN_CACHE = 16 * 2**20
"""The most bytes of a wide tensor of a few images on a CPU."""

ELSEWHERE = 256 * 2**20
"""The same on other devices, where kernel launches are expensive."""

FEW_PIXELS, MANY_IMAGES = 16, 16
"""Images of at most FEW_PIXELS are multiplied in one product if there are at least MANY_IMAGES of them."""


def images_at_a_time(like: Tensor, numbers: int) -> int:
    """Return how many images to process at once, for a wide tensor with `numbers` elements per image."""
    room = IN_CACHE if like.device.type == "cpu" else ELSEWHERE
    return max(1, min(len(like), room // (numbers * like.element_size())))


def parts(images: int, few: int) -> Iterator[slice]:
    """Yield slices of all images, a few at a time."""
    return (slice(start, min(start + few, images)) for start in range(0, images, few))


def sums_like(weight: Tensor, wide: Tensor) -> Tensor:
    """Return zeros for `add_products`: in the shape of `weight`, once for each image if that is small."""
    return weight.new_zeros(len(wide) if _is_small(weight, wide) else 1, *weight.shape)


def times(weight: Tensor, x: Tensor, *, out: Tensor, plus: Tensor | None = None, share: float = 1.0) -> None:
    """Multiply every branch of every image by the weight of the branch, and add `share` times `plus`."""
    if len(x) > 1 and not _is_small(weight, out):
        if _few_pixels(x):
            y_COBP = torch.bmm(weight, _together(x)).view(*weight.shape[:2], len(x), -1)
            y_BCOP = y_COBP.permute(2, 0, 1, 3)
            out.copy_(y_BCOP) if plus is None else torch.add(y_BCOP, plus, alpha=share, out=out)
            return
        for n in range(len(x)):
            times(weight, x[n : n + 1], out=out[n : n + 1], plus=None if plus is None else plus[n : n + 1], share=share)
        return
    factors = weight if len(x) == 1 else for_each(weight, len(x)).flatten(0, 1), x.flatten(0, 1)
    if plus is None:
        torch.bmm(*factors, out=out.flatten(0, 1))
    else:
        torch.baddbmm(plus.flatten(0, 1), *factors, beta=share, out=out.flatten(0, 1))


def add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add to `total` the products of a with b transposed, for every branch of every image.

    `total` is one sum for all images, or one per image.
    """
    if len(total) == 1 and _few_pixels(a):
        total[0].baddbmm_(_together(a), _together(b).mT)
    elif len(total) == 1:
        for n in range(len(a)):
            total[0].baddbmm_(a[n], b[n].mT)
    else:
        total[: len(a)].flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1).mT)


def _few_pixels(x: Tensor) -> bool:
    """Return whether there are many small images, for which one product is faster, in spite of a copy."""
    return x.shape[-1] <= FEW_PIXELS and len(x) >= MANY_IMAGES


def _together(x_BCVP: Tensor) -> Tensor:
    """Put the pixels of all images in one row, CV(BP)."""
    return x_BCVP.permute(1, 2, 0, 3).flatten(2)


def _is_small(weight: Tensor, wide: Tensor) -> bool:
    """Return whether a weight is small enough to be repeated for each image."""
    return 4 * weight.numel() <= wide[0].numel()


def for_each(weight: Tensor, images: int) -> Tensor:
    """Repeat a weight for each image, as a view."""
    return weight.expand(images, *weight.shape)
