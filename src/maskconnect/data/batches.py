"""Batches of a set, epoch by epoch. They do not depend on the number of workers and ranks, or on where a run resumes.

Images in memory are augmented one batch at a time, on their device. Images in files are decoded and cropped in worker
processes; the rest of the augmentation is the same.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from maskconnect.core.host import on_device
from maskconnect.data import randomness
from maskconnect.data.augment import GEOMETRY, NUMBERS, Augmentation, pixel_mean, prepare
from maskconnect.data.decode import decode
from maskconnect.data.geometry import cut
from maskconnect.data.sets import Arrays, Files, Images
from maskconnect.errors import ConfigError, DataError, LostWorkerError, integer


@dataclass(kw_only=True)
class Batches:
    """A set, divided into batches.

        for x, y in Batches(images=train, plan=plan, size=128, mean=mean, training=True).epoch(3): ...

    In training the order changes from epoch to epoch and images are augmented; otherwise neither. The last batch may be
    smaller. `size` is the batch of all ranks together; each rank gets its part of every batch.
    """

    images: Images
    plan: Augmentation
    size: int
    mean: Tensor  # from `mean_of`
    training: bool
    seed: int = 0
    device: torch.device | str = "cpu"
    workers: int = 0  # processes that decode files
    rank: int = 0
    ranks: int = 1
    _resident: Arrays | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if integer("ranks", self.ranks) < 1 or not 0 <= integer("rank", self.rank) < self.ranks:
            raise ConfigError(f"rank is {self.rank} of {self.ranks} ranks; it must be from 0 to {self.ranks - 1}.")
        if integer("batch size", self.size) < 1 or self.size % self.ranks:
            raise ConfigError(
                f"the batch size is {self.size}; it must be a multiple of the number of ranks, {self.ranks}."
            )
        rest = len(self.images) % self.size
        if self.training and 0 < rest < self.ranks:
            raise ConfigError(
                f"the last batch of an epoch has {rest} images for {self.ranks} ranks; each needs at least 1. Change "
                "the batch size."
            )
        cuts = self.plan.area or self.plan.shorter if self.training else self.plan.test_shorter
        if isinstance(self.images, Files) and cuts is None:
            needed = "augmentation.area or augmentation.shorter" if self.training else "augmentation.test_shorter"
            raise ConfigError(
                f"images in files can have any size, so the recipe must say how to crop them. Set {needed}, or "
                'augmentation.mean="pixel" to read images of equal size into memory.'
            )
        if isinstance(self.images, Arrays) and (self.plan.area or self.plan.shorter):
            raise ConfigError(
                "area or shorter is set, but images are in memory; these fields are for images in files. Remove them."
            )
        self.mean = self.mean.to(self.device)
        if isinstance(self.images, Arrays):
            self._resident = Arrays(
                self.images.images.to(self.device), self.images.labels.to(self.device), self.images.classes
            )

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-len(self.images) // self.size)

    def images_of(self, batch: int) -> int:
        """Return the number of images in a batch, on all ranks together."""
        return min(self.size, len(self.images) - batch * self.size)

    def epoch(self, number: int, *, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels of the batches of an epoch, starting from batch `first`."""
        if integer("first", first) < 0:
            raise ConfigError(f"first is {first}; it must be 0 or more.")
        order = np.arange(len(self.images))
        if self.training:
            order = randomness.order(self.seed, number, len(self.images))
        parts = [self._part(order[k * self.size : (k + 1) * self.size]) for k in range(first, len(self))]
        raw = self._from_memory(parts) if self._resident is not None else self._from_files(number, parts)
        for index, (image_NCHW, labels) in zip(parts, raw, strict=True):
            numbers = None
            if self.training:
                found = randomness.uniform(self.seed, number, index, NUMBERS)
                numbers = torch.from_numpy(found).to(self.device)
            yield prepare(image_NCHW, self.plan, self.mean, numbers), labels

    def _part(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's part of a batch: images rank, rank + ranks, ..., as for groups of batch norms."""
        return index[self.rank :: self.ranks]

    def _from_memory(self, parts: list[NDArray[np.int64]]) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._resident is not None
        for index in parts:
            chosen = torch.from_numpy(index).to(self.device)
            yield self._resident.images[chosen], self._resident.labels[chosen]

    def _from_files(self, epoch: int, parts: list[NDArray[np.int64]]) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(self.images, Files)
        pictures = Pictures(self.images, plan=self.plan, seed=self.seed if self.training else None, epoch=epoch)
        for items in _loaded(pictures, [part.tolist() for part in parts], self.workers):
            images = torch.stack([image for image, _ in items]) if items else torch.empty(0, 3, *[self.plan.size] * 2)
            labels = torch.tensor([label for _, label in items], dtype=torch.int64)
            yield on_device(images, self.device), on_device(labels, self.device)


def _loaded(pictures: Pictures, parts: Any, workers: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield the images of each part, decoded by worker processes."""
    # A separate generator: the loader draws from it, and torch's global one belongs to the network.
    own = torch.Generator()
    loader: Any = iter(
        DataLoader(
            pictures,
            batch_sampler=parts,
            num_workers=workers,
            collate_fn=list,
            generator=own,
            worker_init_fn=_ignore_signals,
        )
    )
    with _deaths_deferred():
        try:
            yield from loader
        except DataError as error:
            said = str(error)
            if said.startswith("Caught "):  # the text of an error in a worker includes a traceback
                said = said.strip().rpartition(f"{_NAME}: ")[2]
            raise DataError(said) from None
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not _lost_a_worker(error):
                raise
            raise LostWorkerError(
                "a process that loads images was killed, perhaps because memory ran out; set --workers below "
                f"{workers} and start again."
            ) from None
        finally:
            if workers:
                loader._shutdown_workers()  # before torch's handler is restored, which checks all known workers


def _lost_a_worker(error: Exception) -> bool:
    """Return whether an error of a loader means that a worker died; it may also appear as a broken connection.

    (Errors of a live worker start with "Caught".)
    """
    broken = isinstance(error, ConnectionError | EOFError) and not str(error).startswith("Caught ")
    return broken or str(error).startswith("DataLoader worker (pid")


@contextmanager
def _deaths_deferred() -> Iterator[None]:
    """Make torch report a dead worker only when it requests a batch.

    Its SIGCHLD handler could raise in the middle of a step, whose partial results cannot be saved.
    """
    before = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # torch has set no handler
        return

    def note(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            before(number, frame)

    signal.signal(signal.SIGCHLD, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _ignore_signals(_: int) -> None:
    """Ignore Ctrl-C and end quietly at SIGTERM, because both go to the whole process group.

    If workers died of them, torch would raise an error in the middle of a step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


_NAME = f"{DataError.__module__}.{DataError.__qualname__}"


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images in files, decoded and, with a plan, cropped; in training by the random numbers of each."""

    def __init__(
        self, files: Files, *, plan: Augmentation | None = None, seed: int | None = None, epoch: int = 0
    ) -> None:
        self.files, self.plan, self.seed, self.epoch = files, plan, seed, epoch

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return the image at `index`, as bytes C x H x W, and its label."""
        picture = decode(self.files.root / self.files.names[index])
        if self.plan is not None:
            numbers = None
            if self.seed is not None:
                numbers = randomness.uniform(self.seed, self.epoch, np.array([index]), NUMBERS)[0, GEOMETRY:]
            picture = cut(picture, self.plan, numbers)
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))), int(self.files.labels[index])


def mean_of(train: Images, plan: Augmentation) -> Tensor:
    """Return the mean to subtract from every image, C x H x W or C x 1 x 1."""
    if not isinstance(plan.mean, str):
        return torch.tensor(plan.mean)[:, None, None]
    if isinstance(train, Files):
        raise ConfigError(
            "mean is 'pixel', which needs images in memory; use in_memory(files), or one number per channel."
        )
    return pixel_mean(train.images)


def in_memory(files: Files, *, workers: int = 0) -> Arrays:
    """Decode all images of a set, which must have the same size."""
    if not len(files):
        raise DataError(f"{files.root} has no images of this set; it needs at least 1.")
    images, done = torch.empty(0, dtype=torch.uint8), 0
    parts = [list(range(k, min(k + 64, len(files)))) for k in range(0, len(files), 64)]
    for items in _loaded(Pictures(files), parts, workers):
        for image, _ in items:
            if not done:
                images = torch.empty(len(files), *image.shape, dtype=torch.uint8)
            if image.shape != images.shape[1:]:
                raise DataError(
                    f"{files.root / files.names[done]} is {_size(image)}, {Path(files.names[0]).name} is "
                    f"{_size(images[0])}; images in memory must have the same size. For images of other sizes, set "
                    "augmentation.mean to numbers, and augmentation.area or augmentation.shorter."
                )
            images[done] = image
            done += 1
    return Arrays(images, files.labels, files.classes)


def _size(image: Tensor) -> str:
    return f"{image.shape[1]}x{image.shape[2]}"
