"""What happens to a batch of images on its way into the network, as tensor operations on whatever device they are on.

Every random choice is made from numbers in [0, 1) that belong to the image and the epoch (`randomness.py`), a column
of `number_NK` for each choice. Shape letters: N images, C channels, H height, W width, K numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from maskconnect.errors import ConfigError, DataError, integer, shown
from maskconnect.limits import at_most

# The number in column 0 has decided the place of the image in the epoch (`randomness.order`).
TOP, LEFT, FLIP = 1, 2, 3
JITTER = 4  # three strengths
LIGHTING = 7  # four numbers make three normal ones
GEOMETRY = 11  # where in a file the crop lies (`geometry.py`)
NUMBERS = 64
"""How many numbers every image gets."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What to do with images; the numbers of each data set stand in its recipes.

    Training images are padded, cropped at random and mirrored half of the time; test images are cropped in the centre.
    """

    size: int  # the side of the square that the network sees
    pad: int = 0  # zeros on every side, after the mean was subtracted
    flip: bool = False
    mean: str | tuple[float, ...] = "pixel"  # "pixel": of each pixel over the training set; or one number a channel
    std: tuple[float, ...] | None = None  # one number a channel
    area: tuple[float, float] | None = None  # in files: from and to which share of a picture is seen in training
    shorter: tuple[int, int] | None = None  # or: from and to which length its shorter side is scaled before the crop
    test_shorter: int | None = None  # in files: to which length it is scaled in a test
    jitter: float = 0.0  # of brightness, contrast and saturation
    lighting: float = 0.0  # of colours along their principal components
    components: tuple[tuple[float, ...], ...] = ()  # those, each multiplied by its eigenvalue as published

    def __post_init__(self) -> None:
        if integer("size", self.size) < 1 or integer("pad", self.pad) < 0:
            raise ConfigError(
                f"size is {shown(self.size)} and pad is {shown(self.pad)}; needed are 1 or more and 0 or more."
            )
        for name in ("size", "pad", "test_shorter"):
            at_most(name, getattr(self, name) or 0)
        at_most("shorter", max(self.shorter or (0,)))
        if isinstance(self.mean, str) and self.mean != "pixel":
            raise ConfigError(f"mean is {shown(self.mean)}; it must be 'pixel', or one number a channel.")
        if self.area is not None and not 0 < self.area[0] <= self.area[1] <= 1:
            raise ConfigError(
                f"area is {shown(self.area)}; needed are two shares, above 0 and up to 1, the smaller first."
            )
        if self.shorter is not None and not self.size <= self.shorter[0] <= self.shorter[1]:
            raise ConfigError(
                f"shorter is {shown(self.shorter)}; needed are two lengths from {self.size} on, the smaller first."
            )
        if self.area is not None and self.shorter is not None:
            raise ConfigError("area and shorter are both given; a picture is cut in the one way or in the other.")
        if self.test_shorter is not None and self.test_shorter < self.size:
            raise ConfigError(f"test_shorter is {shown(self.test_shorter)}; it must be {self.size}, the size, or more.")
        if not (0 <= self.jitter < 1 and 0 <= self.lighting < math.inf):
            raise ConfigError(f"jitter is {self.jitter} and lighting {self.lighting}; needed are 0 to 1 and 0 or more.")
        if self.lighting and [len(part) for part in self.components] != [3, 3, 3]:
            raise ConfigError(
                "lighting needs the three principal components of colours, three numbers each (components)."
            )
        if self.std is not None and not all(0 < number < math.inf for number in self.std):
            raise ConfigError(f"std is {shown(self.std)}; it must be one number above 0 a channel.")
        if self.std is not None and not isinstance(self.mean, str) and len(self.mean) != len(self.std):
            raise ConfigError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; each needs one a channel.")


def pixel_mean(images: Tensor) -> Tensor:
    """The mean of each pixel over a set, C x H x W, in [0, 1]."""
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(images), 4096):
        part = images[start : start + 4096]
        total += part.sum(dim=0, dtype=torch.float64)
    return (total / (255 * len(images))).float()


def prepare(image_NCHW: Tensor, plan: Augmentation, mean: Tensor, number_NK: Tensor | None) -> Tensor:
    """Images as the network reads them; without numbers, as in a test.

    `mean` is C x H x W, or C x 1 x 1, and is subtracted before anything is cut off.
    """
    channels = image_NCHW.shape[1]
    if mean.shape[0] != channels or len(plan.std or mean) != channels:
        raise ConfigError(f"images have {channels} channels; mean has {mean.shape[0]}, and std must have as many.")
    if mean.shape[1:] not in ((1, 1), image_NCHW.shape[2:]):
        found, size = ("x".join(map(str, sides)) for sides in (mean.shape[1:], image_NCHW.shape[2:]))
        raise ConfigError(f"images are {size} and the mean is {found}; it must be 1x1, or of the size of the images.")
    if plan.lighting and channels != 3:
        raise ConfigError(f"lighting is of red, green and blue; these images have {channels} channels.")
    x = image_NCHW.float() / 255
    if number_NK is not None and plan.jitter:
        x = jittered(x, plan.jitter, number_NK[:, JITTER : JITTER + 3])
    if number_NK is not None and plan.lighting:
        x = lit(x, plan, number_NK[:, LIGHTING : LIGHTING + 4])
    x -= mean
    if plan.std is not None:
        x /= torch.tensor(plan.std, device=x.device)[:, None, None]
    if number_NK is None:
        return centre_crop(x, plan.size)
    if plan.pad:
        x = F.pad(x, [plan.pad] * 4)
    return random_crop(x, plan.size, number_NK, flip=plan.flip)


def centre_crop(x_NCHW: Tensor, size: int) -> Tensor:
    """The square in the middle."""
    height, width = x_NCHW.shape[2:]
    _check_size(height, width, size)
    top, left = (height - size) // 2, (width - size) // 2
    return x_NCHW[:, :, top : top + size, left : left + size].contiguous()


def random_crop(x_NCHW: Tensor, size: int, number_NK: Tensor, *, flip: bool) -> Tensor:
    """A square anywhere in each image, mirrored half of the time if `flip`."""
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
        raise DataError(f"images of {height}x{width} are smaller than the crop of {size}x{size}; set a smaller size.")


def jittered(x_NCHW: Tensor, strength: float, number_N3: Tensor) -> Tensor:
    """Brightness, contrast and saturation changed by up to `strength`; their order makes no difference."""
    amount_3N111 = (1 + strength * (2 * number_N3 - 1)).to(x_NCHW.dtype).T[..., None, None, None]
    brightness, contrast, saturation = amount_3N111.unbind()
    x: Tensor = brightness * x_NCHW
    average = _grey(x).mean(dim=(2, 3), keepdim=True)
    x = average + contrast * (x - average)
    grey = _grey(x)
    x = grey + saturation * (x - grey)
    return x


def _grey(x_NCHW: Tensor) -> Tensor:
    """The brightness that eyes see."""
    if x_NCHW.shape[1] != 3:
        return x_NCHW.mean(dim=1, keepdim=True)
    return (x_NCHW * x_NCHW.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)


def lit(x_NCHW: Tensor, plan: Augmentation, number_N4: Tensor) -> Tensor:
    """Every image with one colour added, along the principal components of colours."""
    radius_N2 = (-2 * (1 - number_N4[:, :2]).log()).sqrt()  # Box and Muller: two pairs of normal numbers
    angle_N2 = 2 * math.pi * number_N4[:, 2:]
    normal_N3 = torch.cat([radius_N2 * angle_N2.cos(), (radius_N2 * angle_N2.sin())[:, :1]], dim=1)
    components_3C = torch.tensor(plan.components, dtype=normal_N3.dtype, device=x_NCHW.device)
    return x_NCHW + (plan.lighting * normal_N3 @ components_3C)[:, :, None, None].to(x_NCHW.dtype)
