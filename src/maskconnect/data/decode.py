"""Decode JPEG and PNG files, and resize images.

Shape letters: H height, W width.
"""

from __future__ import annotations

import functools
import importlib
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskconnect.errors import ConfigError, DataError, integer, need
from maskconnect.reading import read_bytes

Pixels = NDArray[np.uint8]  # H x W x 3, red, green and blue


REMEDY = "replace it, remove it, or read the set with skip_unreadable=True"
"""The advice about a file of a set that is not an image."""


def decode(path: Path, *, remedy: str = REMEDY) -> Pixels:
    """Return the image in a file as red, green and blue: uint8, H x W x 3.

    Gray becomes three equal channels, CMYK becomes RGB, transparency is dropped, and of 16 bits the upper 8 remain. The
    content of a file decides its format, not its suffix: ImageNet has a PNG that is named .JPEG. `remedy` is the advice
    in the error if the file is not an image.
    """
    # The orientation in EXIF is ignored: training sets are used as stored, also for the accuracies that others
    # report.
    try:
        data = read_bytes(Path(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); restore the file, or remove its name from the set."
        ) from None
    image_HW3 = with_simplejpeg(data)
    return with_pillow(data, str(path), remedy) if image_HW3 is None else image_HW3


def decoder_name() -> str:
    """Return the decoder for most JPEGs: "simplejpeg" if it is installed, else "Pillow"; their images agree."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg"


def with_simplejpeg(data: bytes) -> Pixels | None:
    """Return the image in a valid color or gray JPEG; None for other files, which Pillow decodes or refuses."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not data.startswith(b"\xff\xd8\xff"):
        return None
    limit = need("PIL.Image", extra="data").MAX_IMAGE_PIXELS
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors not in ("YCbCr", "RGB", "Gray") or (limit is not None and height * width > limit):
            return None
        # The fast variants differ from Pillow's image by many gray levels; these differ by at most one.
        image_HW3: Pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)
    except ValueError:
        # It even refuses stray bytes between two markers, which Pillow (and all common training code) skips.
        return None
    return image_HW3


def with_pillow(data: bytes, name: str, remedy: str = REMEDY) -> Pixels:
    """Return the image in any JPEG or PNG; `name` and `remedy` are for the error if there is none."""
    pillow = need("PIL.Image", extra="data")
    try:
        with pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            image.load()
            return _as_rgb(image)
    except MemoryError:
        raise  # not the fault of the file
    except Exception as error:  # on damaged files Pillow can raise OSError, SyntaxError, struct.error, ...
        unknown = isinstance(error, need("PIL", extra="data").UnidentifiedImageError)
        reason = "unknown format" if unknown else str(error).rstrip(".") or type(error).__name__
        raise DataError(f"{name} is not a readable JPEG or PNG image ({reason}); {remedy}.") from None


def resize(
    image_HW3: Pixels, height: int, width: int, *, box: tuple[float, float, float, float] | None = None
) -> Pixels:
    """Resize an image, or a part of it, bilinearly and with antialiasing.

    `box` has the left, top, right and bottom of the part, in fractional pixels.
    """
    if integer("height", height) < 1 or integer("width", width) < 1:
        raise ConfigError(f"height and width are {height} and {width}; both must be 1 or more.")
    if box is None and image_HW3.shape[:2] == (height, width):
        return image_HW3
    pillow = need("PIL.Image", extra="data")
    return np.array(pillow.fromarray(image_HW3).resize((width, height), pillow.Resampling.BILINEAR, box=box))


@functools.cache  # a failing import would search the disk again for every image
def _simplejpeg() -> ModuleType | None:
    """Return the faster decoder, if it is installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _as_rgb(image: Any) -> Pixels:
    """Return the pixels of a Pillow image of any mode."""
    if image.mode.startswith("I"):  # 16-bit gray, which Pillow's conversion would clip at 255
        gray_HW = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray_HW[:, :, None], 3, axis=2)
    if image.mode == "CMYK" and "adobe" not in image.info:
        # Adobe stores CMYK inverted, and Pillow assumes that of every file; this one is not inverted.
        image = need("PIL.ImageChops", extra="data").invert(image)
    if "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow warns about transparent palette entries
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))  # convert always copies
