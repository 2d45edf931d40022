"""Read the images of a recipe, select and shrink them as it says, and make batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maskconnect.data.batches import Batches, in_memory, mean_of
from maskconnect.data.catalog import WITHOUT_FOLDER, load
from maskconnect.data.sets import Arrays, Files, Images, Splits, stratified
from maskconnect.errors import ConfigError, DataError
from maskconnect.recipes.schema import Data, Recipe
from maskconnect.training.options import Options

CHOICE = 0
"""The seed of the selection of images: all runs of a recipe use the same images, whatever their seed."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All batches of a run."""

    train: Batches
    test: Batches
    validation: Batches | None
    classes: tuple[str, ...]
    channels: int
    mean: Tensor  # subtracted from every image

    def fingerprint(self) -> dict[str, Any]:
        """Return the classes, and the numbers and checksums of the images."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        found = {name: fingerprint(part.images) for name, part in parts.items() if part is not None}
        return {"classes": list(self.classes), **found}

    def compare(self, before: dict[str, Any]) -> None:
        """Raise an error if the images differ from those of an earlier fingerprint."""
        now = self.fingerprint()
        if now["classes"] != before.get("classes"):
            raise DataError("the classes differ from those that this run was trained on; pass the same --data.")
        for part, found in now.items():
            there = before.get(part)
            if found != there:
                counts = f" ({there['images']:,} then, {found['images']:,} now)" if isinstance(there, dict) else ""
                raise DataError(f"the {part} images differ from those of this run{counts}; pass the same --data.")


def prepare(
    recipe: Recipe,
    options: Options,
    device: torch.device,
    mean: Tensor | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Prepared:
    """Read the data set of a recipe. `mean` is the mean of the training images, if it is already known."""
    splits = read(recipe.data, options.data)
    plan = recipe.augmentation
    if plan.mean == "pixel":
        splits = replace(splits, **{name: _in_memory(part, options.workers) for name, part in _parts(splits)})
    splits = replace(splits, **{name: _shrunk(part, recipe.data.shrink) for name, part in _parts(splits)})
    mean = mean_of(splits.train, plan) if mean is None else mean

    def batches(images: Images, *, training: bool) -> Batches:
        size = recipe.training.batch_size * (1 if training else 2)
        return Batches(
            images=images,
            plan=plan,
            size=size,
            mean=mean,
            training=training,
            seed=recipe.seed,
            device=device,
            workers=options.workers,
            rank=rank,
            ranks=ranks,
        )

    validation = splits.validation
    return Prepared(
        train=batches(splits.train, training=True),
        test=batches(splits.test, training=False),
        validation=None if validation is None else batches(validation, training=False),
        classes=splits.train.classes,
        channels=splits.train.images.shape[1] if isinstance(splits.train, Arrays) else 3,
        mean=mean,
    )


def fingerprint(images: Images) -> dict[str, Any]:
    """Return the number of images, and a checksum of labels and pixels (for images in files, of their names)."""
    digest = hashlib.sha256(images.labels.cpu().numpy().tobytes())
    if isinstance(images, Arrays):
        digest.update(images.images.cpu().contiguous().numpy().data)
    else:
        digest.update("\n".join(images.names).encode(errors="surrogateescape"))
    return {"images": len(images), "sha256": digest.hexdigest()}


def read(data: Data, root: Path | None) -> Splits:
    """Return the data set, with the number of images that the recipe says."""
    if root is None and data.name not in WITHOUT_FOLDER:
        root = Path("data")
    splits = load(data.name, root, labels=data.labels, validation=data.validation, seed=CHOICE)
    train = splits.train if data.train_images is None else chosen(splits.train, data.train_images, "data.train_images")
    test = splits.test if data.test_images is None else chosen(splits.test, data.test_images, "data.test_images")
    return replace(splits, train=train, test=test)


def averaged(image_NCHW: Tensor, side: int) -> Tensor:
    """Return images as bytes, averaged over squares; the side of a square must divide the sides of the images."""
    return image_NCHW if side == 1 else F.avg_pool2d(image_NCHW.float(), side).round().byte()


def chosen(images: Images, count: int, what: str) -> Images:
    """Return `count` images, balanced over classes."""
    if count > len(images):
        raise ConfigError(f"{what} is {count}; the set has only {len(images)} images. Set it to that or less.")
    if count == len(images):
        return images
    return images.subset(stratified(images, count, CHOICE))


def _parts(splits: Splits) -> list[tuple[str, Images]]:
    parts = (("train", splits.train), ("test", splits.test), ("validation", splits.validation))
    return [(name, part) for name, part in parts if part is not None]


def _in_memory(images: Images, workers: int) -> Images:
    return in_memory(images, workers=workers) if isinstance(images, Files) else images


def _shrunk(images: Images, side: int) -> Images:
    """Return images averaged over squares of this side."""
    if side == 1:
        return images
    if isinstance(images, Files):
        raise ConfigError(f"data.shrink is {side}; images in files cannot be shrunk. Set it to 1.")
    if any(length % side for length in images.images.shape[2:]):
        size = "x".join(map(str, images.images.shape[2:]))
        raise ConfigError(f"data.shrink is {side}; it must divide the height and width of the images, {size}.")
    return replace(images, images=torch.cat([averaged(part, side) for part in torch.split(images.images, 4096)]))
