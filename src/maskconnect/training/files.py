"""Write files whole or not at all, and tensors among them.

A file is written beside its final place, synced and renamed over it, so a reader sees the old content or the new, never
a part. Nothing in it depends on the time: the same content gives the same bytes.
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
"""The file by which a process holds a folder."""

TEMPORARY = ".writing-"
"""How the names of unfinished files and folders begin."""

UNFINISHED = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{16}}")
"""The names that `write_atomically` gives to unfinished files; others are not ours to remove."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file, or replace the one that is there; an OSError leaves the old one and nothing else."""
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
    """Whether this is a file of ours that was never finished, as a process leaves one that is killed."""
    return UNFINISHED.fullmatch(path.name) is not None and path.is_file()


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process has left; the caller holds the folder, so no other process is at work in it."""
    for left in folder.glob(f"{TEMPORARY}*"):
        if is_unfinished(left):
            left.unlink()


@contextlib.contextmanager
def held(place: Path) -> Iterator[None]:
    """Hold a folder by a file in it, which goes when the work is done, and stays if it fails or is killed."""
    with place.open("w") as file:
        if not lock(file):
            raise CheckpointError(f"another process writes in {place.parent}; wait for it, or choose another folder.")
        yield
        place.unlink(missing_ok=True)


def lock(file: TextIO) -> bool:
    """Hold an open file as long as it is open; False where another process does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def fsync_folder(path: Path) -> None:
    """Let the names in a folder, not only the contents of its files, outlast a power cut."""
    if sys.platform == "win32":  # it opens no folders
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, which any reader of that format reads; ours also checks a checksum in it."""
    import safetensors.torch  # here, so that `import maskconnect` need not wait for it

    content = safetensors.torch.save(_separate(tensors))
    header, start = _header(content)
    header["__metadata__"] = {**(metadata or {}), "sha256": ""}
    header["__metadata__"]["sha256"] = _checksum(header, content, start)
    # safetensors alone would write the metadata in another order each time.
    text = _canonical(header)
    text += b" " * (-len(text) % 8)
    write_atomically(path, b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[start:]]))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; if it is one of ours, its checksum must be right."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); name a file of saved tensors.") from None
    import safetensors.torch

    try:
        header, start = _header(content)
        metadata = header.get("__metadata__", {})
        as_written = content[8:start].rstrip(b" ") == _canonical(header)  # \u00e4 and \u00E4 mean the same
        if "sha256" in metadata and not (as_written and metadata["sha256"] == _checksum(header, content, start)):
            raise ValueError("its checksum is wrong")
        return safetensors.torch.load(content)
    except Exception as error:  # whatever a reader of damaged bytes may stumble over
        reason = cut(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or no safetensors file ({reason}); use another copy.") from None


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, and no two of them in the same memory, as the format asks."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        separate[name] = tensor.detach().cpu().contiguous()
        if separate[name].untyped_storage().data_ptr() in seen:
            separate[name] = separate[name].clone(memory_format=torch.contiguous_format)
        seen.add(separate[name].untyped_storage().data_ptr())
    return separate


def _header(content: bytes) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the tensors begin."""
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < max(8, start):
        raise ValueError("it is cut short")
    header = parse_json(content[8:start])
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return header, start


def _canonical(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _checksum(header: dict[str, Any], content: bytes, start: int) -> str:
    """The sha256 of the header, but for the checksum in it, and of the tensors."""
    digest = hashlib.sha256(_canonical({**header, "__metadata__": {**header["__metadata__"], "sha256": ""}}))
    digest.update(memoryview(content)[start:])
    return digest.hexdigest()
