"""The JSON description of a saved network.

It has checksums of itself and of the other files, and the version that wrote it. Damaged files, and files of a newer
version, are refused before anything in them is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from maskconnect.errors import CheckpointError, ConfigError, shown
from maskconnect.reading import MAX_TEXT_BYTES, parse_json, read_bytes
from maskconnect.training.files import write_atomically

NAME = "maskconnect.json"
FORMAT = 1
CHECKSUM = re.compile(rb'"checksum": "[0-9a-f]*"')
KINDS = ("learned", "frozen", "pruned")


def version() -> str:
    """Return the version of maskconnect."""
    from maskconnect import __version__

    return __version__


def write_description(folder: Path, content: dict[str, Any], files: list[str]) -> None:
    """Write the description of a folder; `files` are already there."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    whole = {"format": FORMAT, "maskconnect": version(), **content, "files": sums, "checksum": ""}
    try:
        text = (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        found = shown(error.object[error.start :])
        raise ConfigError(
            f"{found} in the name of a class is not text that UTF-8 can encode. Rename the class."
        ) from None
    checksum = hashlib.sha256(text).hexdigest()
    write_atomically(folder / NAME, CHECKSUM.sub(f'"checksum": "{checksum}"'.encode(), text))


def read_description(folder: Path) -> dict[str, Any]:
    """Read the description of a folder, and check it and the files."""
    place = folder / NAME
    try:
        text = read_bytes(place, MAX_TEXT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        found = (
            "holds no saved network" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        )
        run = " It is the folder of a run; use `maskconnect prune`." if (folder / "recipe.toml").exists() else ""
        raise ConfigError(f"{folder} {found}; pass a folder that mc.save wrote, with a {NAME}.{run}") from None
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be read: {error.strerror}; make it readable, or use another copy."
        ) from None
    try:
        found = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{place} is damaged: it is not valid JSON ({error}). Use another copy.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{place} is damaged: it must hold a table. Use another copy.")
    _check_version(place, found)
    if found.get("checksum") != hashlib.sha256(CHECKSUM.sub(b'"checksum": ""', text)).hexdigest():
        raise CheckpointError(f"{place} is damaged, or was changed by hand: its checksum is wrong. Use another copy.")
    try:
        _check_content(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{place} does not describe a network: {shown(error)}. Use another copy.") from None
    for name, checksum in found["files"].items():
        _check_file(folder / name, checksum)
    return found


def _check_content(found: dict[str, Any]) -> None:
    """Raise a KeyError, TypeError or ValueError if the content is invalid."""
    classes = found["classes"]
    pruned = found["kind"] == "pruned"
    checks = {
        "kind": found["kind"] in KINDS,
        "architecture": found["architecture"] is None or isinstance(found["architecture"], dict),
        "classes": classes is None or (isinstance(classes, list) and all(isinstance(name, str) for name in classes)),
        "preprocessing": found["preprocessing"] is None or isinstance(found["preprocessing"], dict),
        "stacks": all(isinstance(stack, dict) for stack in found["stacks"].values()),
        "fold": not pruned or isinstance(found["fold"], bool),
        "merge": not pruned or isinstance(found["merge"], bool),
        "norm_group": found.get("norm_group") is None or type(found["norm_group"]) is int,
        "files": found["weights"] in found["files"] and found["mean"] in (None, *found["files"]),
        "names of files": all(re.fullmatch(r"[\w-]+\.safetensors", name) for name in found["files"]),
    }
    for name, fine in checks.items():
        if not fine:
            raise ValueError(name)


def _check_version(place: Path, found: dict[str, Any]) -> None:
    written, format_ = found.get("maskconnect"), found.get("format")
    if not isinstance(written, str) or not isinstance(format_, int):
        raise CheckpointError(f"{place} is damaged: it does not say which version wrote it. Use another copy.")
    if format_ > FORMAT or _numbers(written) > _numbers(version()):
        raise CheckpointError(
            f"{place} was written by maskconnect {written} (format {format_}); this is {version()} (format {FORMAT}), "
            "which cannot read it. Install that version, or a newer one."
        )


def _numbers(name: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare: 0.2, 0.2.0 and 0.2.0rc1 are equal."""
    found = re.match(r"\d{1,9}(\.\d{1,9})*", name)
    numbers = [int(number) for number in found.group().split(".")] if found else [10**9]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _check_file(path: Path, checksum: str) -> None:
    try:
        found = hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; the saved network needs it. Use another copy."
        ) from None
    if found != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the one in {NAME}. Use another copy.")
