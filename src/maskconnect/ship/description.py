"""The JSON that stands beside saved weights and says what they are of.

It has a checksum of itself and of the files beside it, and the version that wrote it: what is damaged, or newer than
this program, is refused before anything of it is believed.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.training.files import write_atomically

NAME = "maskconnect.json"
FORMAT = 1
CHECKSUM = re.compile(rb'"checksum": "[0-9a-f]*"')


def version() -> str:
    """That of this program."""
    from maskconnect import __version__

    return __version__


def write_description(folder: Path, content: dict[str, Any], files: list[str]) -> None:
    """Describe what is in a folder; `files` are already there."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    whole = {"format": FORMAT, "maskconnect": version(), **content, "files": sums, "checksum": ""}
    text = (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode()
    checksum = hashlib.sha256(text).hexdigest()
    write_atomically(folder / NAME, CHECKSUM.sub(f'"checksum": "{checksum}"'.encode(), text))


def read_description(folder: Path) -> dict[str, Any]:
    """The description of what is in a folder, once it and the files are found to be sound."""
    place = folder / NAME
    try:
        text = place.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no saved network: there is no {NAME} in it.") from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}.") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{place} is damaged: it is no JSON. Use another copy.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{place} is damaged: it holds no table. Use another copy.")
    _check_version(place, found)
    if found.get("checksum") != hashlib.sha256(CHECKSUM.sub(b'"checksum": ""', text)).hexdigest():
        raise CheckpointError(f"{place} is damaged, or was changed by hand: its checksum is wrong. Use another copy.")
    for name, checksum in found["files"].items():
        _check_file(folder / Path(name).name, checksum)
    return found


def _check_version(place: Path, found: dict[str, Any]) -> None:
    written, format_ = found.get("maskconnect"), found.get("format")
    if not isinstance(written, str) or not isinstance(format_, int):
        raise CheckpointError(f"{place} is damaged: it does not say which version wrote it. Use another copy.")
    if format_ > FORMAT or _numbers(written) > _numbers(version()):
        raise CheckpointError(
            f"{place} was written by maskconnect {written} (format {format_}); this is {version()} (format {FORMAT}), "
            "which cannot know what is new in it. Install that version, or a newer one."
        )


def _numbers(name: str) -> list[int]:
    """The numbers of a version, to compare."""
    return [int(number) for number in re.findall(r"\d+", name.partition("+")[0])]


def _check_file(path: Path, checksum: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; the saved network needs it.") from None
    if found != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum is not that in {NAME}. Use another copy.")
