"""Archives and gzip files of data sets, of which no more is unpacked than a set can have."""

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
"""How many bytes an archive may unpack to; CIFAR takes 187 million."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive, of which nothing may come to lie outside of the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise MaskConnectError("to unpack archives safely needs Python 3.11.4 or newer; unpack it by hand.")
    with opened(archive) as (opened_archive, members):
        for member in members:
            opened_archive.extract(member, folder, filter="data")


def unzipped(path: Path, most: int) -> bytes:
    """The content of a gzip file, which may have no more than `most` bytes."""
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_much(path, most)
    return content


@contextmanager
def opened(path: Path) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    """A .tar.gz and its members, which are files and folders, and which unpack to no more than MOST bytes."""
    try:
        with gzip.open(path) as zipped, tarfile.open(fileobj=_Limited(zipped, path), mode="r:") as archive:
            yield archive, _members(archive, path)
    except tarfile.FilterError as error:
        raise DataError(f"{path.name} is refused, for it would write outside of its folder: {error}.") from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error or type(error).__name__}); get it again.") from None


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    total = 0
    for member in archive:
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise DataError(f"{path} holds {cut(member.name)}, which is neither a file nor a folder; get it again.")
        total += member.size
        if total > MOST:
            raise _too_much(path, MOST)
        yield member


class _Limited(io.RawIOBase):
    """What is in a gzip file, up to the limit; nothing beyond it is unpacked."""

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
    return DataError(f"{path} unpacks to more than {most:,} bytes, which this set has not; get it again.")
