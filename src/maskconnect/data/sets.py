"""Labeled images, in memory or in files, and the splits of a set.

Shape letters: N images, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from maskconnect.errors import ConfigError, DataError, integer


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images in memory."""

    images: Tensor  # uint8, N x C x H x W
    labels: Tensor  # int64, N
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            found = f"{tuple(self.images.shape)} of {self.images.dtype}"
            raise DataError(f"images are {found}; they must be torch.uint8, N x C x H x W.")
        check_labels(self.labels, len(self.images), len(self.classes))

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> Arrays:
        """Return the images at `index`, in that order."""
        return replace(self, images=self.images[index], labels=self.labels[index])


@dataclass(frozen=True, eq=False)
class Files:
    """Images in files, decoded when needed."""

    root: Path
    names: tuple[str, ...]  # relative to the root
    labels: Tensor  # int64, N
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_labels(self.labels, len(self.names), len(self.classes))

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> Files:
        """Return the files at `index`, in that order."""
        return replace(self, names=tuple(self.names[i] for i in index.tolist()), labels=self.labels[index])


Images = Arrays | Files


@dataclass(frozen=True, eq=False)
class Splits:
    """The images for training, for testing and, if any, for validation."""

    train: Images
    test: Images
    validation: Images | None = None


def check_labels(labels: Tensor, images: int, classes: int) -> None:
    """Raise an error unless there is one label per image, and each names a class."""
    if labels.dtype != torch.int64:
        raise DataError(f"labels are {labels.dtype}; they must be torch.int64.")
    if len(labels) != images:
        raise DataError(f"there are {images} images and {len(labels)} labels; each image needs one label.")
    if images and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        wrong = labels[(labels < 0) | (labels >= classes)]
        raise DataError(f"a label is {int(wrong[0])}; with {classes} classes it must be from 0 to {classes - 1}.")


def with_validation(splits: Splits, count: int, seed: int) -> Splits:
    """Move `count` images from training to validation, balanced over classes and selected by the seed."""
    train = splits.train
    if integer("validation", count) == 0:
        return splits
    if splits.validation is not None:
        raise ConfigError(f"validation is {count}, but the set has its own validation images; set it to 0.")
    if not 0 < count < len(train):
        raise ConfigError(
            f"validation is {count}; it must be 0 or more, and below the number of training images, {len(train)}."
        )
    if not 0 <= integer("seed", seed) < 2**63:
        raise ConfigError(f"seed is {seed}; it must be at least 0 and below 2**63.")
    chosen = stratified(train, count, seed)
    kept = torch.ones(len(train), dtype=torch.bool)
    kept[chosen] = False
    for label in sorted(set(train.labels.tolist())):
        if not (train.labels[kept] == label).any():
            name = train.classes[label]
            raise ConfigError(f"validation is {count}, which leaves no training image of class {name!r}; set it lower.")
    return replace(splits, train=train.subset(kept.nonzero()[:, 0]), validation=train.subset(chosen))


def stratified(images: Images, count: int, seed: int) -> Tensor:
    """Return the sorted indices of `count` images, balanced over classes and selected by the seed."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    members = [order[images.labels[order] == label] for label in range(len(images.classes))]
    shares = [len(index) * count / len(images) for index in members]
    taken = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda label: taken[label] - shares[label])
    for label in by_remainder[: count - sum(taken)]:
        taken[label] += 1
    return torch.cat([index[:k] for index, k in zip(members, taken, strict=True)]).sort().values
