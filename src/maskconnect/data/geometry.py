"""Crop images in files, which can have any size.

    area      a crop of random area with an aspect ratio from 3:4 to 4:3, scaled to a square (as for ResNeXt)
    shorter   the shorter side scaled to a random length, then a random square (as for ResNet)
    test      the shorter side scaled to a fixed length, then the square in the center

Only the crop is scaled, which is cheaper than scaling the whole image; so it may begin between two pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskconnect.data.augment import Augmentation
from maskconnect.data.decode import resize

RATIO = (3 / 4, 4 / 3)
TRIES = 10


@dataclass(frozen=True)
class Box:
    """A part of an image."""

    top: float
    left: float
    height: float
    width: float


def area_box(height: int, width: int, area: tuple[float, float], numbers: NDArray[np.float64]) -> Box:
    """Return a box of random area and shape; after ten that do not fit, the largest square in the center."""
    for share, shape, down, right in numbers[: 4 * TRIES].reshape(TRIES, 4):
        pixels = height * width * (area[0] + share * (area[1] - area[0]))
        ratio = math.exp(math.log(RATIO[0]) + shape * math.log(RATIO[1] / RATIO[0]))
        h, w = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    return center_box(height, width, 1.0)


def shorter_box(height: int, width: int, size: int, shorter: tuple[int, int], numbers: NDArray[np.float64]) -> Box:
    """Return the box that becomes a square of `size` when the shorter side is scaled to a random length."""
    scaled = shorter[0] + int(numbers[0] * (shorter[1] - shorter[0] + 1))
    side = min(height, width) * size / scaled
    return Box(numbers[1] * (height - side), numbers[2] * (width - side), side, side)


def center_box(height: int, width: int, share: float) -> Box:
    """Return the square in the center with this share of the shorter side."""
    side = min(height, width) * share
    return Box((height - side) / 2, (width - side) / 2, side, side)


def cut(image_HWC: NDArray[np.uint8], plan: Augmentation, numbers: NDArray[np.float64] | None) -> NDArray[np.uint8]:
    """Return the part of an image that the network sees, as a square; without numbers, as in a test."""
    height, width = image_HWC.shape[:2]
    if numbers is None:
        assert plan.test_shorter is not None
        box = center_box(height, width, plan.size / plan.test_shorter)
    elif plan.area is not None:
        box = area_box(height, width, plan.area, numbers)
    else:
        assert plan.shorter is not None
        box = shorter_box(height, width, plan.size, plan.shorter, numbers)
    right, bottom = min(box.left + box.width, width), min(box.top + box.height, height)
    return resize(image_HWC, plan.size, plan.size, box=(box.left, box.top, right, bottom))
