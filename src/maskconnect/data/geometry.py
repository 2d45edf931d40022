"""Which part of a picture the network sees, for pictures of any size in files.

area      a part of 8 to 100 % of the area with sides of 3:4 to 4:3, scaled to the square (as for ResNeXt)
shorter   the shorter side scaled to 256 to 480 pixels, then a square anywhere (as for ResNet)
test      the shorter side scaled to 8/7 of the square, then the square in the centre (256 for 224)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskconnect.data.decode import resize

AREA, RATIO, SHORTER = (0.08, 1.0), (3 / 4, 4 / 3), (256, 480)
TRIES = 10


@dataclass(frozen=True)
class Box:
    """A part of a picture."""

    top: int
    left: int
    height: int
    width: int


def area_box(height: int, width: int, numbers: NDArray[np.float64]) -> Box:
    """A part of random area and shape; after ten that do not fit, the largest square in the centre."""
    for share, shape, down, right in numbers[: 4 * TRIES].reshape(TRIES, 4):
        area = height * width * (AREA[0] + share * (AREA[1] - AREA[0]))
        ratio = math.exp(math.log(RATIO[0]) + shape * math.log(RATIO[1] / RATIO[0]))
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    side = min(height, width)
    return Box((height - side) // 2, (width - side) // 2, side, side)


def shorter_box(height: int, width: int, size: int, numbers: NDArray[np.float64]) -> Box:
    """The part that becomes a square of `size` when the shorter side is scaled at random."""
    scaled = SHORTER[0] + int(numbers[0] * (SHORTER[1] - SHORTER[0] + 1))
    side = max(1, round(min(height, width) * size / scaled))
    return Box(int(numbers[1] * (height - side + 1)), int(numbers[2] * (width - side + 1)), side, side)


def centre_box(height: int, width: int) -> Box:
    """The square in the centre with 7/8 of the shorter side."""
    side = max(1, round(min(height, width) * 7 / 8))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def cut(image_HWC: NDArray[np.uint8], crop: str, size: int, numbers: NDArray[np.float64] | None) -> NDArray[np.uint8]:
    """The part of a picture that the network sees, as a square of `size`; without numbers, as in a test."""
    height, width = image_HWC.shape[:2]
    if numbers is None:
        box = centre_box(height, width)
    elif crop == "area":
        box = area_box(height, width, numbers)
    else:
        box = shorter_box(height, width, size, numbers)
    part = image_HWC[box.top : box.top + box.height, box.left : box.left + box.width]
    return resize(part, size, size)
