"""Augment and normalize a batch of images, by tensor operations on the device of the images.

Every random choice uses numbers in [0, 1) that depend on the image and the epoch (`randomness.py`), one column of
`number_NK` per choice. Shape letters: N images, C channels, H height, W width, K numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from maskconnect.errors import ConfigError, DataError, integer, shown
from maskconnect.limits import at_most

# The number in column 0 decides the position of the image in the epoch (`randomness.order`).
TOP, LEFT, FLIP = 1, 2, 3
JITTER = 4  # three numbers, one per strength
LIGHTING = 7  # four numbers, from which three normal ones are computed
GEOMETRY = 11  # the crop of an image in a file (`geometry.py`)
NUMBERS = 64
"""The number of random numbers per image."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How images are prepared. Training images are cropped at random, test images in the center.

    The text below a field is its meaning, the second part of `Annotated` its allowed values, as in `recipes/schema.py`.
    """

    size: Annotated[int, "1 or more"]
    """The side of the square that the network sees, in pixels."""
    pad: Annotated[int, "0 or more"] = 0
    """The number of zeros added to each side of a training image, after the mean is subtracted (appendix)."""
    flip: bool = False
    """Whether half of the training images are mirrored (appendix)."""
    mean: Annotated[str | tuple[float, ...], '"pixel", or one number per channel'] = "pixel"
    """The mean to subtract: of each pixel over the training set (appendix), or of each channel, between 0 and 1."""
    std: Annotated[tuple[float, ...] | None, "one number above 0 per channel"] = None
    """The standard deviation of each channel, by which images are divided. If none, they are not."""
    area: Annotated[tuple[float, float] | None, "above 0, at most 1, the smaller first"] = None
    """Images in files: the smallest and the largest share of an image that a training crop covers."""
    shorter: Annotated[tuple[int, int] | None, "size or more, the smaller first"] = None
    """Images in files: the range of lengths to which the shorter side is scaled before a training crop."""
    test_shorter: Annotated[int | None, "size or more"] = None
    """Images in files: the length to which the shorter side is scaled before a test crop."""
    jitter: Annotated[float, "at least 0, below 1"] = 0.0
    """The strength of random changes of brightness, contrast and saturation."""
    lighting: Annotated[float, "0 or more"] = 0.0
    """The standard deviation of random changes of color along the principal components."""
    components: Annotated[tuple[tuple[float, ...], ...], "3 lists of 3 numbers"] = ()
    """The principal components of colors, each times its eigenvalue. Lighting needs them."""

    def __post_init__(self) -> None:
        if integer("size", self.size) < 1 or integer("pad", self.pad) < 0:
            raise ConfigError(
                f"size is {shown(self.size)} and pad is {shown(self.pad)}; size must be 1 or more, and pad 0 or more."
            )
        for name in ("size", "pad", "test_shorter"):
            at_most(name, getattr(self, name) or 0)
        at_most("shorter", max(self.shorter or (0,)))
        if isinstance(self.mean, str) and self.mean != "pixel":
            raise ConfigError(f"mean is {shown(self.mean)}; it must be 'pixel', or one number per channel.")
        if self.area is not None and not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(
                f"area is {shown(self.area)}; it must be two shares above 0 and at most 1, the smaller first."
            )
        if self.shorter is not None and not self.size <= self.shorter[0] <= self.shorter[1]:
            raise ConfigError(
                f"shorter is {shown(self.shorter)}; it must be two lengths of at least {self.size} (the size), the "
                "smaller first."
            )
        if self.area is not None and self.shorter is not None:
            raise ConfigError("area and shorter are both set; training crops use one of them. Remove the other.")
        if self.test_shorter is not None and self.test_shorter < self.size:
            raise ConfigError(f"test_shorter is {shown(self.test_shorter)}; it must be at least the size, {self.size}.")
        if not (0 <= self.jitter < 1 and 0 <= self.lighting < math.inf):
            raise ConfigError(
                f"jitter is {self.jitter} and lighting is {self.lighting}; jitter must be at least 0 and below 1, and "
                "lighting 0 or more."
            )
        if self.lighting and [len(part) for part in self.components] != [3, 3, 3]:
            raise ConfigError(
                "lighting is set without components; set components to the three principal components of colors, three "
                "numbers each."
            )
        if self.std is not None and not all(0 < number < math.inf for number in self.std):
            raise ConfigError(f"std is {shown(self.std)}; it must be one number above 0 per channel.")
        if self.std is not None and not isinstance(self.mean, str) and len(self.mean) != len(self.std):
            raise ConfigError(
                f"mean has {len(self.mean)} numbers and std has {len(self.std)}; both need one number per channel."
            )


def pixel_mean(images: Tensor) -> Tensor:
    """Return the mean of each pixel over a set, C x H x W, in [0, 1]."""
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(images), 4096):
        part = images[start : start + 4096]
        total += part.sum(dim=0, dtype=torch.float64)
    return (total / (255 * len(images))).float()


def prepare(image_NCHW: Tensor, plan: Augmentation, mean: Tensor, number_NK: Tensor | None) -> Tensor:
    """Return images as the network reads them; without numbers, as in a test.

    `mean` is C x H x W, or C x 1 x 1, and is subtracted before the crop.
    """
    channels = image_NCHW.shape[1]
    if mean.shape[0] != channels or len(plan.std or mean) != channels:
        raise ConfigError(
            f"images have {channels} channels and mean has {mean.shape[0]}; mean and std need one number per channel."
        )
    if mean.shape[1:] not in ((1, 1), image_NCHW.shape[2:]):
        found, size = ("x".join(map(str, sides)) for sides in (mean.shape[1:], image_NCHW.shape[2:]))
        raise ConfigError(
            f"images are {size} and the mean is {found}; the mean must be 1x1, or as large as the images."
        )
    if plan.lighting and channels != 3:
        raise ConfigError(
            f"lighting is set for images with {channels} channels; it needs 3: red, green and blue. Set lighting to 0."
        )
    x = image_NCHW.float() / 255
    if number_NK is not None and plan.jitter:
        x = jittered(x, plan.jitter, number_NK[:, JITTER : JITTER + 3])
    if number_NK is not None and plan.lighting:
        x = lit(x, plan, number_NK[:, LIGHTING : LIGHTING + 4])
    x -= mean
    if plan.std is not None:
        x /= torch.tensor(plan.std, device=x.device)[:, None, None]
    if number_NK is None:
        return center_crop(x, plan.size)
    if plan.pad:
        x = F.pad(x, [plan.pad] * 4)
    return random_crop(x, plan.size, number_NK, flip=plan.flip)


def center_crop(x_NCHW: Tensor, size: int) -> Tensor:
    """Cut out the square in the center."""
    height, width = x_NCHW.shape[2:]
    _check_size(height, width, size)
    top, left = (height - size) // 2, (width - size) // 2
    return x_NCHW[:, :, top : top + size, left : left + size].contiguous()


def random_crop(x_NCHW: Tensor, size: int, number_NK: Tensor, *, flip: bool) -> Tensor:
    """Cut a square out of each image at random, and mirror half of them if `flip`."""
    n, channels, height, width = x_NCHW.shape
    _check_size(height, width, size)
    top_N1 = (number_NK[:, TOP, None] * (height - size + 1)).long()
    left_N1 = (number_NK[:, LEFT, None] * (width - size + 1)).long()
    step = torch.arange(size, device=x_NCHW.device)
    column_NS = left_N1 + step
    if flip:
        mirrored_N1 = number_NK[:, FLIP, None] < 0.5
        column_NS = torch.where(mirrored_N1, column_NS.flip(1), column_NS)
    pixel_NSS = (top_N1 + step)[:, :, None] * width + column_NS[:, None, :]
    index = pixel_NSS.reshape(n, 1, size * size).expand(-1, channels, -1)
    return x_NCHW.reshape(n, channels, height * width).gather(2, index).reshape(n, channels, size, size)


def _check_size(height: int, width: int, size: int) -> None:
    if height < size or width < size:
        raise DataError(f"images are {height}x{width}, smaller than the crop of {size}x{size}; set a smaller size.")


def jittered(x_NCHW: Tensor, strength: float, number_N3: Tensor) -> Tensor:
    """Change brightness, contrast and saturation by up to `strength`; their order makes no difference."""
    amount_3N111 = (1 + strength * (2 * number_N3 - 1)).to(x_NCHW.dtype).T[..., None, None, None]
    brightness, contrast, saturation = amount_3N111.unbind()
    x: Tensor = brightness * x_NCHW
    average = _gray(x).mean(dim=(2, 3), keepdim=True)
    x = average + contrast * (x - average)
    gray = _gray(x)
    x = gray + saturation * (x - gray)
    return x


def _gray(x_NCHW: Tensor) -> Tensor:
    """Return the perceived brightness of each pixel."""
    if x_NCHW.shape[1] != 3:
        return x_NCHW.mean(dim=1, keepdim=True)
    return (x_NCHW * x_NCHW.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)


def lit(x_NCHW: Tensor, plan: Augmentation, number_N4: Tensor) -> Tensor:
    """Add one random color to every image, along the principal components of colors."""
    radius_N2 = (-2 * (1 - number_N4[:, :2]).log()).sqrt()  # Box and Muller: two pairs of normal numbers
    angle_N2 = 2 * math.pi * number_N4[:, 2:]
    normal_N3 = torch.cat([radius_N2 * angle_N2.cos(), (radius_N2 * angle_N2.sin())[:, :1]], dim=1)
    components_3C = torch.tensor(plan.components, dtype=normal_N3.dtype, device=x_NCHW.device)
    return x_NCHW + (plan.lighting * normal_N3 @ components_3C)[:, :, None, None].to(x_NCHW.dtype)
