"""Checkpoints, from which a stopped run resumes. Each is complete or does not exist.

    checkpoints/step-000000123/state.pt       a plain nested state: dicts, lists, numbers, strings, tensors
                               manifest.json  its size and sha256; written last

A checkpoint is written to a temporary folder, synced and renamed. So a kill at any moment leaves the previous one, and
the checksum detects damage on disk. State is loaded as data only (`weights_only`): code in it never runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from maskconnect.errors import CheckpointError
from maskconnect.reading import read_json, regular
from maskconnect.training.files import TEMPORARY, fsync_folder, write_atomically

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
FEWEST = 2  # if there were only one, damage to it would end the run
NAME = re.compile(r"step-(\d{9,})(-old-[0-9a-f]{8})?")
"""A checkpoint that is being replaced has the suffix until the new one is in place."""


class _UnusableError(Exception):
    """The reason why a checkpoint cannot be used, as part of a sentence."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; only one process may write into the folder at a time."""

    folder: Path
    keep: int = FEWEST  # the number of complete checkpoints to keep; at least 2

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove the oldest. An error leaves earlier checkpoints unchanged."""
        final = self.folder / f"step-{step:09d}"
        temporary = self.folder / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._make_room()
            temporary.mkdir()
            _write(temporary, step, state)
            if final.exists():
                final.rename(f"{final}-old-{secrets.token_hex(4)}")
            temporary.rename(final)
            fsync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self._unwritable(step, error)) from None
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(step, final)
        return final

    def latest(self, warn: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
        """Return the step and the state of the newest complete checkpoint, or None if there are no checkpoints.

        Args:
            warn: called with one sentence for each newer checkpoint that cannot be used.
        """
        try:
            found = self._newest_first()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.folder} cannot be read ({error.strerror}). Make the folder readable."
            ) from None
        unusable: list[tuple[Path, str]] = []
        for step, path in found:
            try:
                state = _read(path, step)
            except _UnusableError as error:
                unusable.append((path, str(error)))
                continue
            for newer, reason in unusable:
                warn(f"{newer} cannot be used: {reason}; using the one before it, {path.name}.")
            return step, state
        if unusable:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used ("
                + "; ".join(f"{path.name}: {reason}" for path, reason in unusable)
                + "); restore one from a backup, or restart with --fresh."
            )
        return None

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Return the steps and the folders of all checkpoints, complete or not."""
        if not self.folder.exists():
            return []
        named = [(NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        found = [(int(match[1]), match[2] is None, path) for match, path in named if match]
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _make_room(self) -> None:
        """Create the folder, and remove what a killed process left in it."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(self.folder.parent)
        for path in self.folder.iterdir():
            if path.name.startswith(TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, saved: int, final: Path) -> None:
        """Remove checkpoints older than the newest `keep` complete ones, and the one that `final` replaced.

        Damaged ones do not count, so they never displace complete ones. Newer ones stay and do not count.
        """
        complete = 1  # the one just saved
        with contextlib.suppress(OSError):  # the checkpoint is saved; the next save reports a full disk
            for step, path in self._newest_first():
                if step > saved or path == final:
                    continue
                if step == saved or complete >= max(self.keep, FEWEST):
                    shutil.rmtree(path, ignore_errors=True)
                elif _is_complete(path, step):
                    complete += 1

    def _unwritable(self, step: int, error: OSError) -> str:
        """Return the message for a checkpoint that could not be written."""
        last = None
        with contextlib.suppress(OSError):
            last = next((path.name for step, path in self._newest_first() if _is_complete(path, step)), None)
        intact = f"the previous one, {last}, is intact" if last else "there is no earlier one"
        reason = error.strerror or error
        return f"the checkpoint of step {step} cannot be written to {self.folder} ({reason}); {intact}."


class _Hashed:
    """A file that computes the checksum of what is written to it.

    After a failed write it discards all further data, because torch's writer would hide the reason behind its own
    error; `finish` raises the first error.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch calls this, `finish` flushes."""

    def finish(self) -> None:
        if self.error is not None:
            raise self.error
        self.file.flush()
        os.fsync(self.file.fileno())


def _write(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write and sync the files of a checkpoint, the manifest last."""
    with (folder / STATE).open("xb") as file:
        hashed = _Hashed(file)
        torch.save(state, hashed)  # type: ignore[arg-type]
        hashed.finish()
    unsafe = get_unsafe_globals_in_checkpoint(folder / STATE)
    assert not unsafe, f"the state holds {', '.join(unsafe)}, which cannot be loaded back"
    files = {STATE: {"size": hashed.size, "sha256": hashed.digest.hexdigest()}}
    write_atomically(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2) + "\n")


def _read(folder: Path, step: int) -> dict[str, Any]:
    """Return the state in a checkpoint, if it is complete."""
    _check(folder, step)
    try:
        state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        raise _UnusableError(f"{STATE} contains more than plain data") from None
    except Exception as error:  # a damaged file can raise anything
        raise _UnusableError(f"{STATE} cannot be loaded ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise _UnusableError(f"{STATE} does not contain a state")
    return state


def _is_complete(folder: Path, step: int) -> bool:
    try:
        _check(folder, step)
    except _UnusableError:
        return False
    return True


def _check(folder: Path, step: int) -> None:
    """Raise an error if the files of a checkpoint are damaged."""
    try:
        manifest = read_json(folder / MANIFEST)
        version, written, entry = manifest["format"], manifest["step"], manifest["files"][STATE]
        size, sha256 = entry["size"], entry["sha256"]
    except OSError as error:
        raise _UnusableError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError):
        raise _UnusableError(f"{MANIFEST} is damaged") from None
    if isinstance(version, int) and version > FORMAT:
        raise _UnusableError(
            f"a newer maskconnect wrote it (format {version}; this version reads formats up to {FORMAT})"
        )
    if version != FORMAT or written != step:
        raise _UnusableError(f"{MANIFEST} is damaged")
    try:
        regular(folder / STATE)
        with (folder / STATE).open("rb") as file:
            there = os.fstat(file.fileno()).st_size
            if there != size:
                raise _UnusableError(f"{STATE} has {there} bytes instead of {size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise _UnusableError(f"{STATE} has a wrong checksum")
    except OSError as error:
        raise _UnusableError(f"{STATE} cannot be read ({error.strerror})") from None
