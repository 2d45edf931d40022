"""Checkpoints: what a stopped run resumes from, each of them whole or not there.

    checkpoints/step-000000123/state.pt       a plain nested state: dicts, lists, numbers, strings, tensors
                               manifest.json  its size and sha256; written last

A checkpoint is made in a temporary folder, synced and renamed. So a kill at any moment leaves the one before it, and
damage to a disk is found by the checksum. State is loaded as data only (`weights_only`): no code in it ever runs.
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
FEWEST = 2  # with a single one, damage to it would end the run
NAME = re.compile(r"step-(\d{9,})(-old-[0-9a-f]{8})?")
"""A checkpoint that is being replaced has the second form until the new one is in its place."""


class _UnusableError(Exception):
    """What is wrong with a checkpoint, as a part of a sentence."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; only one process may write into the folder at a time."""

    folder: Path
    keep: int = FEWEST  # how many whole ones stay; at least 2

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove the oldest; on an error the ones before are as they were."""
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
        """The step and the state of the newest checkpoint that is whole, or None if there are no checkpoints at all.

        Args:
            warn: called with one sentence for each newer checkpoint that cannot be used.
        """
        try:
            found = self._newest_first()
        except OSError as error:
            raise CheckpointError(f"the checkpoints in {self.folder} cannot be read ({error.strerror}).") from None
        unusable: list[tuple[Path, str]] = []
        for step, path in found:
            try:
                state = _read(path, step)
            except _UnusableError as error:
                unusable.append((path, str(error)))
                continue
            for newer, reason in unusable:
                warn(f"{newer} cannot be used: {reason}; the one before it, {path.name}, is used.")
            return step, state
        if unusable:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used ("
                + "; ".join(f"{path.name}: {reason}" for path, reason in unusable)
                + "); bring back a whole one, or begin anew with --fresh."
            )
        return None

    def _newest_first(self) -> list[tuple[int, Path]]:
        """The steps and the folders of all checkpoints, whole or not."""
        if not self.folder.exists():
            return []
        named = [(NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        found = [(int(match[1]), match[2] is None, path) for match, path in named if match]
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _make_room(self) -> None:
        """Make the folder, and remove what a killed process has left in it."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(self.folder.parent)
        for path in self.folder.iterdir():
            if path.name.startswith(TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, saved: int, final: Path) -> None:
        """Remove what is older than the newest `keep` whole ones, and what `final` has replaced.

        A damaged one does not count, so the last whole ones never make room for it. Newer ones stay and do not count.
        """
        whole = 1  # the one just saved
        with contextlib.suppress(OSError):  # the checkpoint is safe; a full disk will show at the next one
            for step, path in self._newest_first():
                if step > saved or path == final:
                    continue
                if step == saved or whole >= max(self.keep, FEWEST):
                    shutil.rmtree(path, ignore_errors=True)
                elif _is_whole(path, step):
                    whole += 1

    def _unwritable(self, step: int, error: OSError) -> str:
        """The sentence for a checkpoint that could not be written."""
        last = None
        with contextlib.suppress(OSError):
            last = next((path.name for step, path in self._newest_first() if _is_whole(path, step)), None)
        intact = f"the last good one, {last}, is intact" if last else "there is none before it"
        reason = error.strerror or error
        return f"the checkpoint of step {step} cannot be written to {self.folder} ({reason}); {intact}."


class _Hashed:
    """A file that sums up what is written to it.

    After a failed write it takes the rest and drops it, for torch's writer would hide the reason behind an error of
    its own; `finish` raises it.
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
        """Torch wants it; `finish` does it."""

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
    assert not unsafe, f"the state holds {', '.join(unsafe)}, which could not be loaded again"
    files = {STATE: {"size": hashed.size, "sha256": hashed.digest.hexdigest()}}
    write_atomically(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2) + "\n")


def _read(folder: Path, step: int) -> dict[str, Any]:
    """The state in a checkpoint, if it is whole."""
    _check(folder, step)
    try:
        state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        raise _UnusableError(f"{STATE} holds more than plain data") from None
    except Exception as error:  # whatever a reader of foreign bytes may stumble over
        raise _UnusableError(f"{STATE} cannot be loaded ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise _UnusableError(f"{STATE} holds no state")
    return state


def _is_whole(folder: Path, step: int) -> bool:
    try:
        _check(folder, step)
    except _UnusableError:
        return False
    return True


def _check(folder: Path, step: int) -> None:
    """Raise what is wrong with the files of a checkpoint, if anything is."""
    try:
        manifest = read_json(folder / MANIFEST)
        version, written, entry = manifest["format"], manifest["step"], manifest["files"][STATE]
        size, sha256 = entry["size"], entry["sha256"]
    except OSError as error:
        raise _UnusableError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError):
        raise _UnusableError(f"{MANIFEST} is damaged") from None
    if isinstance(version, int) and version > FORMAT:
        raise _UnusableError(f"a newer maskconnect wrote it (format {version}, this one reads up to {FORMAT})")
    if version != FORMAT or written != step:
        raise _UnusableError(f"{MANIFEST} is damaged")
    try:
        regular(folder / STATE)
        with (folder / STATE).open("rb") as file:
            there = os.fstat(file.fileno()).st_size
            if there != size:
                raise _UnusableError(f"{STATE} has {there} bytes, not {size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise _UnusableError(f"{STATE} has a wrong checksum")
    except OSError as error:
        raise _UnusableError(f"{STATE} cannot be read ({error.strerror})") from None
