"""Turn an image file into the input of a network, like the test images of its data set.

If the set is in files, images are cropped as in `maskconnect evaluate`. If the set is in memory, where all images have
the same size, an image is scaled and cropped in the center to that size, unless it already has it. Nothing else is
changed: a network that was trained on digits expects them white on black, and the EXIF orientation is ignored, as in
training. Shape letters: N images, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskconnect.data.augment import Augmentation, prepare
from maskconnect.data.catalog import SIDES
from maskconnect.data.decode import Pixels, decode, resize
from maskconnect.data.geometry import cut
from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError, integer, need, shown
from maskconnect.limits import at_most
from maskconnect.recipes.schema import Recipe
from maskconnect.training.images import averaged

REMEDY = "pass a JPEG or PNG file"
FIELDS = ("channels", "raw", "test_shorter", "shrink", "size", "std")


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessing:
    """The test preprocessing of a data set. Either `raw` or `test_shorter` is set."""

    channels: int  # 3, or 1 for gray
    raw: tuple[int, int] | None = None  # set in memory: height and width of its images
    test_shorter: int | None = None  # set in files: the length to which the shorter side is scaled
    shrink: int = 1  # then average over squares with this side
    size: int  # the side of the square in the center, which the network sees
    mean: Tensor  # subtracted before the crop: C x H x W, or C x 1 x 1; in [0, 1]
    std: tuple[float, ...] | None = None  # the divisor, one number per channel

    def __post_init__(self) -> None:
        if integer("channels", self.channels) not in (1, 3):
            raise ConfigError(f"channels is {shown(self.channels)}; it must be 3, or 1 for gray.")
        if integer("size", self.size) < 1 or integer("shrink", self.shrink) < 1:
            raise ConfigError(f"size is {self.size} and shrink is {self.shrink}; both must be 1 or more.")
        for field, side in (("size", self.size), ("shrink", self.shrink), ("test_shorter", self.test_shorter or 0)):
            at_most(field, side)
        at_most("raw", max(self.raw or (0,)))
        if (self.raw is None) == (self.test_shorter is None):
            raise ConfigError("exactly one of raw and test_shorter must be set.")
        height, width = self._before_the_crop()
        if min(height, width) < self.size:
            raise ConfigError(f"size is {self.size}; it must be at most the sides of the images, {height}x{width}.")
        if self.mean.dtype != torch.float32 or not bool(self.mean.isfinite().all()):
            raise ConfigError(f"mean is {self.mean.dtype}; it must be torch.float32, and finite.")
        if tuple(self.mean.shape) not in {(self.channels, 1, 1), (self.channels, height, width)}:
            found = "x".join(map(str, self.mean.shape))
            raise ConfigError(f"mean is {found}; it must be {self.channels}x1x1 or {self.channels}x{height}x{width}.")
        if self.std is not None and (
            len(self.std) != self.channels or not all(0 < number < math.inf for number in self.std)
        ):
            raise ConfigError(
                f"std is {shown(self.std)}; it must be one number above 0 for each of {self.channels} channels."
            )

    def _before_the_crop(self) -> tuple[int, int]:
        """Return the height and width of images before the crop; an error if they are invalid."""
        if self.raw is None:
            assert self.test_shorter is not None
            if integer("test_shorter", self.test_shorter) < self.size:
                raise ConfigError(f"test_shorter is {self.test_shorter}; it must be at least the size, {self.size}.")
            if self.shrink != 1 or self.channels != 3:
                raise ConfigError(
                    f"channels is {self.channels} and shrink is {self.shrink}; for a set in files they must be 3 and 1."
                )
            return self.size, self.size
        if len(self.raw) != 2 or any(integer("raw", side) < 1 or side % self.shrink for side in self.raw):
            raise ConfigError(
                f"raw is {shown(self.raw)}; it must be height and width, both multiples of {self.shrink}."
            )
        return self.raw[0] // self.shrink, self.raw[1] // self.shrink

    def describe(self) -> dict[str, Any]:
        """Return everything except for the mean, as plain data for JSON."""
        described = {name: getattr(self, name) for name in FIELDS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in described.items()}

    def read_pictures(self, paths: Sequence[Path]) -> Tensor:
        """Return images in files as the network reads them: float32, N x C x size x size."""
        if not paths:
            return torch.empty(0, self.channels, self.size, self.size)
        return self.prepared(torch.stack([self.pixels(path) for path in paths]))

    def pixels(self, path: Path) -> Tensor:
        """Return the image in a file as bytes, C x H x W, in the size that `prepared` takes."""
        picture_HW3 = decode(path, remedy=REMEDY)
        part_HW3 = cut(picture_HW3, self._plan(), None) if self.raw is None else _covering(picture_HW3, *self.raw)
        picture_HWC = part_HW3 if self.channels == 3 else _gray(part_HW3)
        return torch.from_numpy(np.ascontiguousarray(picture_HWC.transpose(2, 0, 1)))

    def prepared(self, pixels_NCHW: Tensor) -> Tensor:
        """Return images of bytes as the network reads them."""
        return prepare(averaged(pixels_NCHW, self.shrink), self._plan(), self.mean.to(pixels_NCHW.device), None)

    def _plan(self) -> Augmentation:
        return Augmentation(size=self.size, std=self.std, test_shorter=self.test_shorter)


def of_recipe(recipe: Recipe, mean: Tensor) -> Preprocessing:
    """Return the preprocessing of a recipe's test images, given the mean of the training images."""
    plan, shrink = recipe.augmentation, recipe.data.shrink
    side = SIDES.get(recipe.data.name)
    raw = None if side is None else (side, side)
    if plan.mean == "pixel":  # then images in files are read into memory too, and the mean has their size
        raw = (mean.shape[1] * shrink, mean.shape[2] * shrink)
    return Preprocessing(
        channels=mean.shape[0],
        raw=raw,
        test_shorter=plan.test_shorter if raw is None else None,
        shrink=shrink,
        size=plan.size,
        mean=mean,
        std=plan.std,
    )


def from_description(described: object, mean: Tensor, *, where: str = "the preprocessing") -> Preprocessing:
    """Return the preprocessing from its description and mean; `where` names the description in errors."""
    if not isinstance(described, dict):
        raise CheckpointError(f"{where} is not a table; it must have {', '.join(FIELDS)}.")
    for name in [*described, *FIELDS]:
        if name not in FIELDS or name not in described:
            problem = "is unknown" if name not in FIELDS else "is missing"
            raise CheckpointError(f"{where}: {name} {problem}; it must have {', '.join(FIELDS)}.")
    try:
        numbers = {name: _integer(name, described[name]) for name in ("channels", "test_shorter", "shrink", "size")}
        raw, std = (_numbers(name, described[name], kind) for name, kind in (("raw", int), ("std", float)))
        return Preprocessing(**numbers, raw=raw, std=std, mean=mean)
    except MaskConnectError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _integer(name: str, found: object) -> Any:
    if name == "test_shorter" and found is None:
        return None
    return integer(name, found)


def _numbers(name: str, found: object, kind: type) -> Any:
    """Return a list of numbers as a tuple; None stays None."""
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(number) in (int, kind) for number in found):
        raise ConfigError(f"{name} is {shown(found)}; it must be a list of numbers.")
    return tuple(kind(number) for number in found)


def _covering(picture_HW3: Pixels, height: int, width: int) -> Pixels:
    """Crop the largest centered part with these proportions, and resize it."""
    h, w = picture_HW3.shape[:2]
    if (h, w) == (height, width):
        return picture_HW3
    part_h, part_w = (h, h * width / height) if h * width <= w * height else (w * height / width, w)
    top, left = (h - part_h) / 2, (w - part_w) / 2
    return resize(picture_HW3, height, width, box=(left, top, min(left + part_w, w), min(top + part_h, h)))


def _gray(picture_HW3: Pixels) -> Pixels:
    """Return the perceived brightness, H x W x 1; gray images stay unchanged."""
    pillow = need("PIL.Image", extra="data")
    return np.array(pillow.fromarray(picture_HW3).convert("L"))[:, :, None]
