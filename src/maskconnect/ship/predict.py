"""Predict the classes of images in files.

Shape letters: N images, R ranks (the most likely classes, best first).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from maskconnect.errors import CheckpointError, ConfigError, DataError, integer
from maskconnect.ship.preprocessing import Preprocessing
from maskconnect.ship.saved import Saved
from maskconnect.training.options import device_of
from maskconnect.training.predictions import TOP, evaluating

BATCH = 32
"""The number of images per forward pass."""


@dataclass(frozen=True)
class Likely:
    """A class with its probability."""

    number: int
    name: str | None  # None if the classes have no names
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of an image, best first; or the problem with the file."""

    path: Path
    likely: tuple[Likely, ...] = ()
    problem: str | None = None


def predict_files(
    saved: Saved, paths: Iterable[Path], *, top: int = TOP, batch: int = BATCH, device: str = "cpu"
) -> Iterator[Prediction]:
    """Yield the most likely classes of the image in each file, in order; `batch` images are in memory at a time.

    For a file that cannot be read, the prediction has the problem instead.
    """
    for name, value in (("top", top), ("batch", batch)):
        if integer(name, value) < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more.")
    if saved.preprocessing is None:
        raise ConfigError(
            "this network was saved without preprocessing, which is needed to read images; save it again with "
            "mc.save(model, folder, preprocessing=...), or pass the folder of its run."
        )
    return _in_batches(saved, saved.preprocessing, iter(paths), top, batch, device_of(device))


def _in_batches(
    saved: Saved, preprocessing: Preprocessing, paths: Iterator[Path], top: int, batch: int, device: torch.device
) -> Iterator[Prediction]:
    saved.network.to(device)
    while some := list(islice(paths, batch)):
        read = [_read(path, preprocessing) for path in some]
        found: Iterator[tuple[Likely, ...]] = iter(())
        if pictures := [picture for picture in read if isinstance(picture, Tensor)]:
            found = iter(_likeliest(saved, preprocessing.prepared(torch.stack(pictures).to(device)), top))
        for path, picture in zip(some, read, strict=True):
            if isinstance(picture, Tensor):
                yield Prediction(path, next(found))
            else:
                yield Prediction(path, problem=picture)


def _read(path: Path, preprocessing: Preprocessing) -> Tensor | str:
    """Return the bytes of an image, or the reason why it cannot be read."""
    if path.is_dir():
        return f"{path} is a folder; pass the images in it, such as {path}/*.png"
    if not path.exists():
        return f"{path} does not exist; pass a JPEG or PNG file"
    try:
        return preprocessing.pixels(path)
    except DataError as error:
        return str(error)


@torch.inference_mode()
def _likeliest(saved: Saved, x_NCHW: Tensor, top: int) -> list[tuple[Likely, ...]]:
    try:
        with evaluating(saved.network):
            scores = saved.network(x_NCHW)
    except RuntimeError as error:
        size, reason = "x".join(map(str, x_NCHW.shape[1:])), str(error).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"the network cannot read images of {size}, the size in its description: {reason}. Use another copy, or "
            "save it again with the right preprocessing."
        ) from None
    classes = None if saved.classes is None else len(saved.classes)
    if scores.dim() != 2 or classes not in (None, scores.shape[1]):
        found = "x".join(map(str, scores.shape[1:]))
        raise CheckpointError(f"the network returns {found} scores per image, but its folder names {classes} classes.")
    if not bool(scores.isfinite().all()):
        raise CheckpointError(
            "the network returns scores that are not finite; its weights are damaged. Use another copy."
        )
    probability_NR, class_NR = scores.float().softmax(dim=1).topk(min(top, scores.shape[1]))
    return [
        _named(numbers, probabilities, saved.classes)
        for numbers, probabilities in zip(class_NR.tolist(), probability_NR.tolist(), strict=True)
    ]


def _named(
    numbers: Sequence[int], probabilities: Sequence[float], classes: tuple[str, ...] | None
) -> tuple[Likely, ...]:
    ranks = zip(numbers, probabilities, strict=True)
    return tuple(Likely(number, None if classes is None else classes[number], p) for number, p in ranks)
