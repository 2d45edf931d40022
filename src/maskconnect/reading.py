"""Read untrusted files: a file that is not regular, too large or too deeply nested is an error and never a hang.

A file that cannot be read raises an OSError, content that cannot be parsed a ValueError. Callers add which file it is.
"""

from __future__ import annotations

import errno
import json
import math
import stat
import tomllib
from pathlib import Path
from typing import Any, NoReturn

MAX_TEXT_BYTES = 64 << 20
"""The largest size of a JSON or TOML file, in bytes."""

MAX_DEPTH = 32
"""The largest nesting depth of lists and tables; our deepest file, a kept result, has 7 levels."""

MAX_DOTS = 200
"""The largest number of dots in a line of TOML: the parsing time of dotted keys grows quadratically."""


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file; opening a pipe or reading a device could block forever."""
    size = regular(path)
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
    return path.read_bytes()


def regular(path: Path) -> int:
    """Return the size of a file in bytes; raise an OSError for a pipe, a device or a socket.

    A folder is not rejected here: reading it fails with a clear error.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(path))
    return found.st_size


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file."""
    return read_bytes(path, MAX_TEXT_BYTES).decode(encoding)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON with at most MAX_DEPTH levels; with `finite`, infinite numbers and NaN are errors."""
    kinds: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    try:
        return _shallow(json.loads(text, **kinds))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML with at most MAX_DEPTH levels."""
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MAX_DOTS} dots")
    try:
        found: dict[str, Any] = _shallow(tomllib.loads(text))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    return found


def _shallow(found: Any) -> Any:
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _parts(outer)]
        if not level:
            return found
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _parts(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"it holds a number that is not finite, {text[:20]}")
