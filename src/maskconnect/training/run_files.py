"""Read the files of a run, and check them, so that every command reports damaged or foreign files.

A shape is a `Kind`, a table of shapes (a key that ends in ? may be missing), a list with one shape for all items, or a
tuple of alternative shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maskconnect.errors import CheckpointError, shown
from maskconnect.reading import read_json
from maskconnect.training.files import load_tensors

LARGEST = 1e30
"""Larger numbers count as infinite."""


@dataclass(frozen=True)
class Kind:
    """A kind of plain value, with its name for errors."""

    name: str
    fits: Callable[[Any], bool]


def _is_number(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < LARGEST


NOTHING = Kind("null", lambda found: found is None)
TEXT = Kind("a string", lambda found: isinstance(found, str))
NUMBER = Kind("a number", _is_number)
PERCENT = Kind("a number from 0 to 100", lambda found: _is_number(found) and 0 <= found <= 100)
SECONDS = Kind("a number of 0 or more", lambda found: _is_number(found) and found >= 0)
COUNT = Kind("a whole number of 0 or more", lambda found: type(found) is int and 0 <= found < 2**63)
SOME = Kind("a whole number of 1 or more", lambda found: type(found) is int and 0 < found < 2**63)
CHOSEN = Kind("test or validation", lambda found: found in ("test", "validation"))
NONE_YET = Kind("an empty table", lambda found: found == {})

SCORES = {"loss?": (NUMBER, NOTHING), "top1": PERCENT, "top5": PERCENT}
SUMMARY = {
    **{"recipe": TEXT, "seed": COUNT, "connectivity": TEXT, "fan_in": (COUNT, NOTHING)},
    **{"test": SCORES, "validation?": (SCORES, NOTHING)},
    "best": {"epoch": COUNT, "chosen_on": CHOSEN, "test": SCORES, "validation?": SCORES},
    "freeze": ({"drawn": SCORES, "frozen": SCORES}, NONE_YET, NOTHING),
    "parameters": {"weights": SOME, "mask_entries": COUNT, "pruned_one_step": COUNT, "pruned": COUNT},
    **{"epochs": COUNT, "steps": COUNT, "skipped": COUNT, "seconds": SECONDS},
}
IMAGES = {"images": COUNT, "sha256": TEXT}
DATA = {"classes": [TEXT], "train": IMAGES, "validation?": IMAGES, "test": IMAGES}
SOURCES = [COUNT]
WIRING = ([SOURCES], [[SOURCES]])

Tensors = dict[str, Tensor]


def check(found: Any, shape: Any, where: str) -> None:
    """Raise a ValueError that names the place, if the data have another shape."""
    if isinstance(shape, Kind):
        if not shape.fits(found):
            raise ValueError(f"{where} is {shown(found)}; it must be {shape.name}")
    elif isinstance(shape, tuple):
        _check_one_of(found, shape, where)
    elif isinstance(shape, list):
        _check_kind(found, list, "a list", where)
        for item in found:
            check(item, shape[0], f"an item of {where}")
    else:
        _check_kind(found, dict, "a table", where)
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in found:
                check(found[name], inner, name if where == "it" else f"{where}.{name}")
            elif name == key:
                raise ValueError(f"{where} has no {name}")


def _check_kind(found: Any, kind: type, name: str, where: str) -> None:
    if not isinstance(found, kind):
        raise ValueError(f"{where} is {shown(found)}; it must be {name}")


def _check_one_of(found: Any, shapes: tuple[Any, ...], where: str) -> None:
    """Raise the error of the first shape, if none of the shapes fits."""
    errors = []
    for shape in shapes:
        try:
            return check(found, shape, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def read_plain(path: Path, shape: Any) -> Any:
    """Return the content of a JSON file of a run; an error if it does not have the shape."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} cannot be read: {reason}. Use another copy of the run.") from None
    try:
        check(found, shape, "it")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Use another copy of the run.") from None
    return found


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the names of the classes, at least one."""
    found = read_plain(path, Kind("JSON", lambda found: True))
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path} is damaged: it must be a list of names. Use another copy of the run.")
    return tuple(found)


def read_mean(path: Path) -> Tensor:
    """Return the mean that is subtracted from every image, C x H x W."""
    found = load_tensors(path)
    if "mean" not in found:
        raise CheckpointError(f"{path} does not contain a mean. Use another copy of the run.")
    mean = found["mean"]
    if mean.dim() != 3 or not mean.numel() or mean.dtype != torch.float32 or not bool(mean.isfinite().all()):
        kind = f"{tuple(mean.shape)} of {mean.dtype}"
        raise CheckpointError(f"{path} has a mean of {kind}; it must be C x H x W of torch.float32, and finite.")
    return mean


def read_predictions(path: Path, classes: int) -> Tensors:
    """Return the predictions for the test set: label N, class and probability N x R, wrong W, maybe wrong_images."""
    found = load_tensors(path)
    try:
        _check_predictions(found, classes)
    except (KeyError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path} is damaged: {reason}. Use another copy of the run.") from None
    return found


def _check_predictions(found: Tensors, classes: int) -> None:
    label_N, class_NR, probability_NR, wrong_W = (found[key] for key in ("label", "class", "probability", "wrong"))
    count = len(label_N) if label_N.dim() else 0
    fine = {
        "label": label_N.dim() == 1 and _among(label_N, classes),
        "class": class_NR.dim() == 2 and len(class_NR) == count and class_NR.shape[1] and _among(class_NR, classes),
        "probability": probability_NR.shape == class_NR.shape and probability_NR.is_floating_point(),
        "wrong": wrong_W.dim() == 1 and _among(wrong_W, count),
    }
    pictures = found.get("wrong_images")
    if pictures is not None:
        fine["wrong_images"] = pictures.dim() == 4 and len(pictures) == len(wrong_W) and pictures.dtype == torch.uint8
    for name, is_fine in fine.items():
        if not is_fine:
            shape = "x".join(map(str, found[name].shape))
            raise ValueError(
                f"{name} is {shape} of {found[name].dtype} and does not fit {count} images, {classes} classes"
            )


def _among(found: Tensor, count: int) -> bool:
    """Return whether all values are from 0 to `count` - 1."""
    if found.dtype != torch.int64:
        return False
    return not found.numel() or 0 <= int(found.min()) <= int(found.max()) < count
