"""Batches of a set, epoch by epoch: the same whatever the number of workers and ranks, and from wherever one starts.

Images in memory are augmented a batch at a time, on the device that they are on. Images in files are decoded and cut in
worker processes; what is left is done with the batch, likewise.
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

from maskconnect.data import randomness
from maskconnect.data.augment import GEOMETRY, NUMBERS, Augmentation, pixel_mean, prepare
from maskconnect.data.decode import decode
from maskconnect.data.geometry import cut
from maskconnect.data.sets import Arrays, Files, Images
from maskconnect.errors import ConfigError, DataError, LostWorkerError, integer


@dataclass(kw_only=True)
class Batches:
    """A set, cut into batches.

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
            raise ConfigError(f"rank is {self.rank} of {self.ranks}; it must be 0 or more, and less than the ranks.")
        if integer("batch size", self.size) < 1 or self.size % self.ranks:
            raise ConfigError(f"the batch size is {self.size}; it must be a multiple of the {self.ranks} ranks.")
        rest = len(self.images) % self.size
        if self.training and 0 < rest < self.ranks:
            raise ConfigError(
                f"the last batch of an epoch would have {rest} images for {self.ranks} ranks; take another batch size."
            )
        cuts = self.plan.area or self.plan.shorter if self.training else self.plan.test_shorter
        if isinstance(self.images, Files) and cuts is None:
            needed = "augmentation.area or augmentation.shorter" if self.training else "augmentation.test_shorter"
            raise ConfigError(
                f"images in files are of any size, and nothing says how to cut them: set {needed} in the recipe; "
                'augmentation.mean="pixel" reads images of one size into memory instead.'
            )
        if isinstance(self.images, Arrays) and (self.plan.area or self.plan.shorter):
            raise ConfigError(
                "area and shorter are for images in files; those in memory are padded and cropped as they are."
            )
        self.mean = self.mean.to(self.device)
        if isinstance(self.images, Arrays):
            self._resident = Arrays(
                self.images.images.to(self.device), self.images.labels.to(self.device), self.images.classes
            )

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return -(-len(self.images) // self.size)

    def images_of(self, batch: int) -> int:
        """How many images a batch has, on all ranks together."""
        return min(self.size, len(self.images) - batch * self.size)

    def epoch(self, number: int, *, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from the one numbered `first` on: images and labels."""
        if integer("first", first) < 0:
            raise ConfigError(f"first is {first}; batches are numbered from 0 on.")
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
        """This rank's part of a batch: every so-many-th image, as of the groups that batch norms may have."""
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
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def _loaded(pictures: Pictures, parts: Any, workers: int) -> Iterator[list[tuple[Tensor, int]]]:
    """The pictures of each part, decoded by worker processes."""
    # A generator of its own: the loader draws from it for its workers, and torch's global one is the network's.
    own = torch.Generator()
    loader: Any = iter(
        DataLoader(
            pictures, batch_sampler=parts, num_workers=workers, collate_fn=list, generator=own, worker_init_fn=_quiet
        )
    )
    with _deaths_wait():
        try:
            yield from loader
        except DataError as error:
            said = str(error)
            if said.startswith("Caught "):  # from a worker it comes with a traceback in its text
                said = said.strip().rpartition(f"{_NAME}: ")[2]
            raise DataError(said) from None
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not _lost_a_worker(error):
                raise
            raise LostWorkerError(
                "a process that loads images was killed, perhaps because memory ran out; lower --workers "
                f"(it is {workers}), and start again."
            ) from None
        finally:
            if workers:
                loader._shutdown_workers()  # before deaths count again: torch asks of all that it knows


def _lost_a_worker(error: Exception) -> bool:
    """Whether an error of a loader is the death of a worker; if its last batch was on the way, a broken connection.

    (Errors of a worker that lives start with "Caught".)
    """
    broken = isinstance(error, ConnectionError | EOFError) and not str(error).startswith("Caught ")
    return broken or str(error).startswith("DataLoader worker (pid")


@contextmanager
def _deaths_wait() -> Iterator[None]:
    """Let torch find a dead worker where it asks for a batch: its handler of SIGCHLD would raise in any line of a step.

    What a step has half done could not be saved.
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


def _quiet(_: int) -> None:
    """Ctrl-C and SIGTERM go to a whole group of processes: workers leave the first to the process that loads.

    At the second they end without a fuss. If they died of it, torch would raise an error in the middle of a step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


_NAME = f"{DataError.__module__}.{DataError.__qualname__}"


class Pictures(Dataset[tuple[Tensor, int]]):
    """Files, decoded and, if there is a plan, cut; for training with the numbers of (seed, epoch, index)."""

    def __init__(
        self, files: Files, *, plan: Augmentation | None = None, seed: int | None = None, epoch: int = 0
    ) -> None:
        self.files, self.plan, self.seed, self.epoch = files, plan, seed, epoch

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The picture at `index`, C x H x W of bytes, and its label."""
        picture = decode(self.files.root / self.files.names[index])
        if self.plan is not None:
            numbers = None
            if self.seed is not None:
                numbers = randomness.uniform(self.seed, self.epoch, np.array([index]), NUMBERS)[0, GEOMETRY:]
            picture = cut(picture, self.plan, numbers)
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))), int(self.files.labels[index])


def mean_of(train: Images, plan: Augmentation) -> Tensor:
    """What is subtracted from every image: C x H x W, or C x 1 x 1."""
    if not isinstance(plan.mean, str):
        return torch.tensor(plan.mean)[:, None, None]
    if isinstance(train, Files):
        raise ConfigError(
            "mean is 'pixel', which needs images of one size in memory; use in_memory(files), or numbers."
        )
    return pixel_mean(train.images)


def in_memory(files: Files, *, workers: int = 0) -> Arrays:
    """All pictures of a set, decoded; they must be of one size."""
    if not len(files):
        raise DataError(f"there are no images of this set in {files.root}.")
    images, done = torch.empty(0, dtype=torch.uint8), 0
    parts = [list(range(k, min(k + 64, len(files)))) for k in range(0, len(files), 64)]
    for items in _loaded(Pictures(files), parts, workers):
        for image, _ in items:
            if not done:
                images = torch.empty(len(files), *image.shape, dtype=torch.uint8)
            if image.shape != images.shape[1:]:
                raise DataError(
                    f"{files.root / files.names[done]} is {_size(image)}, {Path(files.names[0]).name} is "
                    f"{_size(images[0])}: images that are kept in memory must be of one size. For others set "
                    "augmentation.mean to numbers, and augmentation.area or augmentation.shorter."
                )
            images[done] = image
            done += 1
    return Arrays(images, files.labels, files.classes)


def _size(image: Tensor) -> str:
    return f"{image.shape[1]}x{image.shape[2]}"
