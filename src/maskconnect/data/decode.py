"""Turn a JPEG or PNG file into pixels, and pixels into fewer or more of them.

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


REMEDY = "get it anew, remove it, or read the set with skip_unreadable=True"
"""What to do about a file of a set that is no image."""


def decode(path: Path, *, remedy: str = REMEDY) -> Pixels:
    """The image in a file, of whatever kind it is, as red, green and blue: uint8, H x W x 3.

    Grey becomes three equal channels, inks become light, transparency is left out, and of 16 bits the upper 8 remain.
    The content of a file decides what it is, not its suffix: ImageNet has a PNG that is called .JPEG. `remedy` is what
    the error advises where there is no image.
    """
    # The orientation that a camera notes in EXIF is ignored: training sets are used as stored, also for the
    # accuracies that others report.
    try:
        data = read_bytes(Path(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); put the image there, or remove its name.") from None
    image_HW3 = with_simplejpeg(data)
    return with_pillow(data, str(path), remedy) if image_HW3 is None else image_HW3


def decoder_name() -> str:
    """Which decoder is used for most JPEGs: "simplejpeg" if it is installed, else "Pillow"; their images agree."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg"


def with_simplejpeg(data: bytes) -> Pixels | None:
    """The image in a sound JPEG of light or grey; None for all else, which Pillow is to decode or to refuse."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not data.startswith(b"\xff\xd8\xff"):
        return None
    limit = need("PIL.Image", extra="data").MAX_IMAGE_PIXELS
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "RGB", "Gray") or (limit is not None and height * width > limit):
            return None
        # The fast variants of either would be many grey levels apart from Pillow's image, these are at most one.
        image_HW3: Pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)
    except ValueError:
        # It refuses even stray bytes between two markers, over which Pillow (and everybody's training) steps.
        return None
    return image_HW3


def with_pillow(data: bytes, name: str, remedy: str = REMEDY) -> Pixels:
    """The image in any JPEG or PNG; `name` and `remedy` are for the error if there is none."""
    pillow = need("PIL.Image", extra="data")
    try:
        with pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            image.load()
            return _as_rgb(image)
    except MemoryError:
        raise  # says nothing about the file
    except Exception as error:  # on damaged files Pillow raises nearly anything: OSError, SyntaxError, struct.error...
        unknown = isinstance(error, need("PIL", extra="data").UnidentifiedImageError)
        reason = "no such image begins in it" if unknown else str(error).rstrip(".") or type(error).__name__
        raise DataError(f"{name} is not a readable JPEG or PNG image ({reason}); {remedy}.") from None


def resize(
    image_HW3: Pixels, height: int, width: int, *, box: tuple[float, float, float, float] | None = None
) -> Pixels:
    """The image, or a part of it, in another size, bilinear; when it shrinks, every old pixel counts (antialiasing).

    `box` is left, top, right and bottom of the part, in pixels and fractions of them.
    """
    if integer("height", height) < 1 or integer("width", width) < 1:
        raise ConfigError(f"height and width are {height} and {width}; both must be 1 or more.")
    if box is None and image_HW3.shape[:2] == (height, width):
        return image_HW3
    pillow = need("PIL.Image", extra="data")
    return np.array(pillow.fromarray(image_HW3).resize((width, height), pillow.Resampling.BILINEAR, box=box))


@functools.cache  # a failing import searches the disk anew for every image
def _simplejpeg() -> ModuleType | None:
    """The faster decoder, if it is installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _as_rgb(image: Any) -> Pixels:
    """The pixels of a Pillow image of any mode."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip at 255
        grey_HW = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey_HW[:, :, None], 3, axis=2)
    if image.mode == "CMYK" and "adobe" not in image.info:
        # Adobe stores inks inverted, and Pillow takes every file for Adobe's; this one has them as they are.
        image = need("PIL.ImageChops", extra="data").invert(image)
    if "transparency" in image.info:
        image = image.convert("RGBA")  # else Pillow warns of a palette with transparent entries
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))  # converting copies in any case
