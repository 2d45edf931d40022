"""Read CIFAR-10 and CIFAR-100 from the files that their authors publish.

Accepted: the folder `cifar-10-batches-py`, `cifar-10-batches-bin` or `cifar-100-python`, a folder that holds one of
them or its archive (`cifar-10-python.tar.gz` and so on), or the archive itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskconnect.data.archive import MOST, opened
from maskconnect.data.sets import Arrays, Splits
from maskconnect.data.unpickle import read_plain_pickle
from maskconnect.errors import DataError, unknown_name
from maskconnect.reading import read_bytes

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_BIN_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR100_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}

Read = Callable[[str], bytes]  # the content of a file of the folder or archive, by its name


def read_cifar10(root: Path, *, verified: bool = True) -> Splits:
    """Read CIFAR-10: 50,000 and 10,000 images of 32x32 in 10 classes."""
    forms = {"cifar-10-batches-py": "cifar-10-python.tar.gz", "cifar-10-batches-bin": "cifar-10-binary.tar.gz"}
    form, read = _open(root, "cifar10", forms)
    if form == "cifar-10-batches-bin":
        sums = CIFAR10_BIN_MD5
        batches = [_records(_content(read, name, sums, verified), name) for name in sums]
    else:
        sums = CIFAR10_MD5
        batches = [_pickled(_content(read, name, sums, verified), name, b"labels") for name in sums]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    return Splits(train=_arrays(pixels, labels, CIFAR10_CLASSES), test=_arrays(*batches[-1], CIFAR10_CLASSES))


def read_cifar100(root: Path, *, labels: str = "fine", verified: bool = True) -> Splits:
    """Read CIFAR-100: 50,000 and 10,000 images of 32x32 in 100 fine or 20 coarse classes."""
    if labels not in ("fine", "coarse"):
        raise unknown_name("labels", labels, ("fine", "coarse"))
    _, read = _open(root, "cifar100", {"cifar-100-python": "cifar-100-python.tar.gz"})
    meta = read_plain_pickle(_content(read, "meta", CIFAR100_MD5, verified), "meta")
    names = _entry(meta, f"{labels}_label_names".encode(), "meta")
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise DataError("meta has no list of class names; it is not a file of this set. Download the set again.")
    classes = tuple(name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)
    if len(set(classes)) < len(classes):
        raise DataError("meta names a class twice; it is not a file of this set. Download the set again.")
    key = f"{labels}_labels".encode()
    train, test = (
        _arrays(*_pickled(_content(read, name, CIFAR100_MD5, verified), name, key), classes)
        for name in ("train", "test")
    )
    return Splits(train=train, test=test)


def _open(root: Path, name: str, forms: dict[str, str]) -> tuple[str, Read]:
    """Return which of the forms is at `root`, and a function that reads its files."""
    for folder, archive in forms.items():
        for place in (root, root / folder):
            if place.is_dir() and place.name == folder:
                return folder, partial(_member_of_folder, place)
        for place in (root, root / archive):
            if place.is_file() and place.name == archive:
                return folder, partial(_member_of_archive, _members(place, folder))
    if root.is_file():
        raise DataError(f"{root} must be named {' or '.join(forms.values())}; rename it, or pass its folder.")
    wanted = ", ".join([*forms, *forms.values()])
    raise DataError(f"{name} is not in {root}: looked for {wanted}. To get it: maskconnect data fetch {name} {root}")


def _member_of_folder(folder: Path, file: str) -> bytes:
    return read_bytes(folder / file, MOST)


def _member_of_archive(members: dict[str, bytes], file: str) -> bytes:
    if file not in members:
        raise FileNotFoundError(file)
    return members[file]


def _members(path: Path, folder: str) -> dict[str, bytes]:
    """Return all files of an archive at once, because it can only be read from its beginning."""
    wanted = {f"{folder}/{name}": name for name in (*CIFAR10_MD5, *CIFAR10_BIN_MD5, *CIFAR100_MD5)}
    found = {}
    try:
        with opened(path) as (archive, members):
            for member in members:
                content = archive.extractfile(member) if member.name in wanted else None
                if content is not None:
                    found[wanted[member.name]] = content.read()
    except OSError as error:
        raise DataError(f"{path} is damaged or truncated ({type(error).__name__}); download it again.") from None
    return found


def _content(read: Read, name: str, sums: dict[str, str], verified: bool) -> bytes:
    """Return the content of a file; an error if its checksum is not the published one."""
    try:
        content = read(name)
    except FileNotFoundError:
        raise DataError(f"{name} is missing from the set; download it again.") from None
    except OSError as error:
        raise DataError(f"{name} of the set cannot be read ({error.strerror}); download it again.") from None
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if verified and found != sums[name]:
        raise DataError(
            f"{name} has the md5 sum {found}, not the published {sums[name]}: it is damaged or another version. "
            "Download it again, or accept it with --unverified (verified=False)."
        )
    return content


def _pickled(content: bytes, name: str, key: bytes) -> tuple[Any, Any]:
    """Return the pixels and labels of a batch of the python version."""
    batch = read_plain_pickle(content, name)
    try:
        pixels, labels = np.asarray(_entry(batch, b"data", name)), np.asarray(_entry(batch, key, name))
    except (ValueError, OverflowError):
        raise DataError(
            f"{name} holds rows of different lengths; it is not a file of this set. Download the set again."
        ) from None
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or pixels.dtype != np.uint8:
        raise DataError(
            f"{name} holds pixels of shape {pixels.shape} and type {pixels.dtype}; they must be N x 3072 of uint8. "
            "Download the set again."
        )
    if labels.ndim != 1 or labels.dtype.kind != "i" or len(labels) != len(pixels):
        raise DataError(
            f"{name} holds {len(pixels)} images and labels of shape {labels.shape}; it must hold one integer per "
            "image. Download the set again."
        )
    return pixels, labels


def _records(content: bytes, name: str) -> tuple[Any, Any]:
    """Return the pixels and labels of a batch of the binary version: per image a label byte and 3072 pixel bytes."""
    if not content or len(content) % 3073:
        raise DataError(
            f"{name} has {len(content)} bytes, which is not a multiple of 3073: it is truncated; download it again."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _entry(batch: Any, key: bytes, name: str) -> Any:
    for wanted in (key, key.decode()):
        if isinstance(batch, dict) and wanted in batch:
            return batch[wanted]
    raise DataError(f"{name} has no {key.decode()!r}; it is not a file of this set. Download the set again.")


def _arrays(pixels: Any, labels: Any, classes: tuple[str, ...]) -> Arrays:
    images = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32).copy())
    return Arrays(images, torch.from_numpy(np.asarray(labels, dtype=np.int64).copy()), classes)
