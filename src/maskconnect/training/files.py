"""Write files atomically, and tensors as safetensors files.

A file is written to a temporary name in the same folder, synced and renamed, so a reader sees either the old or the new
content. Nothing depends on the time: the same content gives the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from maskconnect.errors import CheckpointError, cut
from maskconnect.reading import parse_json, read_bytes

LOCK = ".lock"
"""The file that a process locks to claim a folder."""

TEMPORARY = ".writing-"
"""The prefix of the names of unfinished files and folders."""

UNFINISHED = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{16}}")
"""The names that `write_atomically` gives to unfinished files; no others may be removed."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file, or replace an existing one. An OSError leaves the old file and nothing else."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


def is_unfinished(path: Path) -> bool:
    """Return whether this is an unfinished file that a killed process left."""
    return UNFINISHED.fullmatch(path.name) is not None and path.is_file()


def remove_unfinished(folder: Path) -> None:
    """Remove files that a killed process left. The caller must hold the folder, so no other process writes there."""
    for left in folder.glob(f"{TEMPORARY}*"):
        if is_unfinished(left):
            left.unlink()


@contextlib.contextmanager
def held(place: Path) -> Iterator[None]:
    """Hold a folder by a lock file, which is removed at the end and stays if the process fails or is killed."""
    ours = False
    while not ours:
        with place.open("w") as file:
            if not lock(file):
                raise CheckpointError(
                    f"another process is writing to {place.parent}; wait for it, or choose another folder."
                )
            if ours := _is_at(file, place):  # otherwise another process ended, and removed it, before we locked it
                yield
                place.unlink(missing_ok=True)


def _is_at(file: TextIO, place: Path) -> bool:
    """Return whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), place.stat())
    except FileNotFoundError:
        return False


def lock(file: TextIO) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # this file system has no locks
    return True


def fsync_folder(path: Path) -> None:
    """Sync the names in a folder, so that they survive a power failure."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems cannot sync folders and need not
            raise
    finally:
        os.close(handle)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file with a checksum in its metadata, which `load_tensors` checks."""
    import safetensors.torch  # here, so that `import maskconnect` stays fast

    content = safetensors.torch.save(_separate(tensors))
    header, start = _header(content)
    header["__metadata__"] = {**(metadata or {}), "sha256": ""}
    header["__metadata__"]["sha256"] = _checksum(header, content, start)
    # safetensors itself writes the metadata in a different order each time.
    text = _canonical(header)
    text += b" " * (-len(text) % 8)
    write_atomically(path, b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[start:]]))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, and check its checksum if it has one."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); pass a safetensors file that exists."
        ) from None
    import safetensors.torch

    try:
        header, start = _header(content)
        metadata = header.get("__metadata__", {})
        as_written = content[8:start].rstrip(b" ") == _canonical(header)  # \u00e4 and \u00E4 mean the same
        if "sha256" in metadata and not (as_written and metadata["sha256"] == _checksum(header, content, start)):
            raise ValueError("its checksum is wrong")
        return safetensors.torch.load(content)
    except Exception as error:  # a damaged file can raise anything
        reason = cut(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or not a safetensors file ({reason}); use another copy.") from None


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous and without shared memory, as the format requires."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        separate[name] = tensor.detach().cpu().contiguous()
        if separate[name].untyped_storage().data_ptr() in seen:
            separate[name] = separate[name].clone(memory_format=torch.contiguous_format)
        seen.add(separate[name].untyped_storage().data_ptr())
    return separate


def _header(content: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position where the tensors begin."""
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < max(8, start):
        raise ValueError("it is truncated")
    header = parse_json(content[8:start])
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    return header, start


def _canonical(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _checksum(header: dict[str, Any], content: bytes, start: int) -> str:
    """Return the sha256 of the tensors and of the header without its checksum."""
    digest = hashlib.sha256(_canonical({**header, "__metadata__": {**header["__metadata__"], "sha256": ""}}))
    digest.update(memoryview(content)[start:])
    return digest.hexdigest()
