"""Unpack archives and gzip files of data sets, up to a size limit."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maskconnect.errors import DataError, MaskConnectError, cut

MOST = 512 << 20
"""The largest unpacked size of an archive in bytes; CIFAR has 187 million."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder; members outside of the folder are an error."""
    if not hasattr(tarfile, "data_filter"):
        raise MaskConnectError(
            "this Python cannot unpack archives safely; use Python 3.11.4 or newer, or unpack the archive by hand."
        )
    with opened(archive) as (opened_archive, members):
        for member in members:
            opened_archive.extract(member, folder, filter="data")


def unzipped(path: Path, most: int) -> bytes:
    """Return the content of a gzip file, at most `most` bytes."""
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_much(path, most)
    return content


@contextmanager
def opened(path: Path) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    """Open a .tar.gz and yield its members: files and folders that unpack to at most MOST bytes."""
    try:
        with gzip.open(path) as zipped, tarfile.open(fileobj=_Limited(zipped, path), mode="r:") as archive:
            yield archive, _members(archive, path)
    except tarfile.FilterError as error:
        raise DataError(
            f"{path.name} would write outside of its folder: {error}. Download it again from the official site."
        ) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is damaged or truncated ({error or type(error).__name__}); download it again."
        ) from None


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    total = 0
    for member in archive:
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise DataError(
                f"{path} holds {cut(member.name)}, which is neither a file nor a folder; download it again."
            )
        total += member.size
        if total > MOST:
            raise _too_much(path, MOST)
        yield member


class _Limited(io.RawIOBase):
    """The content of a gzip file up to the limit; nothing beyond it is unpacked."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        self.file, self.path = file, path

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, place: int, whence: int = 0) -> int:
        if whence != 0 or place > MOST:
            raise _too_much(self.path, MOST)
        return self.file.seek(place)

    def read(self, size: int = -1) -> bytes:
        if size < 0 or self.file.tell() + size > MOST:
            raise _too_much(self.path, MOST)
        return self.file.read(size)


def _too_much(path: Path, most: int) -> DataError:
    return DataError(f"{path} unpacks to more than {most:,} bytes, the limit for this set; download it again.")
