"""Read files that may be anything: what is not a regular file, is nested deeply or holds too much is an error, never a
hang. What cannot be read is an OSError, and what makes no sense a ValueError; callers say what the file is for.
"""

from __future__ import annotations

import errno
import json
import math
import stat
import tomllib
from pathlib import Path
from typing import Any, NoReturn

MOST_TEXT = 64 << 20
"""How many bytes a file of JSON or TOML may have."""

DEEPEST = 32
"""How deep lists and tables may be nested; a kept result, which goes deepest, has 7 levels."""

MOST_DOTS = 200
"""How many dots a line of TOML may have: of keys with more, the time to read them grows as the square."""


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file. To open a pipe, or to read a device, may take forever."""
    size = regular(path)
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
    return path.read_bytes()


def regular(path: Path) -> int:
    """How many bytes a file has; an OSError if it is a pipe, a device or a socket. Of a folder, the reader says so."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(path))
    return found.st_size


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text in a regular file."""
    return read_bytes(path, MOST_TEXT).decode(encoding)


def read_json(path: Path) -> Any:
    """What a JSON file says."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """JSON as plain data, nested no deeper than DEEPEST; with numbers that are finite, unless these are allowed."""
    kinds: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    try:
        return _shallow(json.loads(text, **kinds))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as plain data, nested no deeper than DEEPEST."""
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    try:
        found: dict[str, Any] = _shallow(tomllib.loads(text))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    return found


def _shallow(found: Any) -> Any:
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _parts(outer)]
        if not level:
            return found
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _parts(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"it holds a number that is not finite, {text[:20]}")
