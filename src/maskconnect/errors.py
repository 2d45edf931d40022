"""Errors for the user. A message says what was found, what is allowed and what to do."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Iterable
from types import ModuleType

LONGEST = 80
"""The largest number of characters of a value that an error message repeats."""


class MaskConnectError(Exception):
    """Base class of all errors that maskconnect raises on purpose; the caller can fix the cause."""


class ConfigError(MaskConnectError):
    """Raised for an invalid argument, option or recipe."""


class ConnectivityError(MaskConnectError):
    """Raised for a wiring, a mask or a shape that does not fit the network."""


class DataError(MaskConnectError):
    """Raised for data that is missing, damaged or of another kind than its name says."""


class CheckpointError(MaskConnectError):
    """Raised for a saved state that is damaged, cannot be written or belongs to another network."""


class ReportedElsewhereError(MaskConnectError):
    """Raised if another process of the same run has already reported the error."""


class LostRankError(MaskConnectError):
    """Raised if another process of the same run has died; a restart resumes from the last checkpoint."""


class LostWorkerError(MaskConnectError):
    """Raised if a data loading process was killed; a restart with fewer of them resumes from the last checkpoint."""


def cut(text: str) -> str:
    """Shorten a text for an error message to its first LONGEST characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def shown(found: object) -> str:
    """Return the repr of a value for an error message, shortened if it is long."""
    try:
        return cut(repr(found))
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4,300 digits
        return f"a {type(found).__name__} too large to show"


def printable(text: str) -> str:
    """Escape line ends and control codes, so that a terminal prints them instead of executing them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unknown_name(what: str, found: object, known: Iterable[str], *, or_else: str = "") -> ConfigError:
    """Return the error for a name that is not in `known`, with the closest known name."""
    names = list(map(cut, known))
    near = difflib.get_close_matches(found[:LONGEST], names, n=1) if isinstance(found, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{what} is {shown(found)}; it must be one of {', '.join(names)}{or_else}.{hint}")


def integer(what: str, found: object) -> int:
    """Return `found` as an integer. Integers of numpy are allowed, bools and floats are not.

    Raises:
        ConfigError: if `found` is not an integer; the message calls it `what`.
    """
    try:
        if isinstance(found, bool):
            raise TypeError
        return operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{what} is {shown(found)}; it must be an integer.") from None


def number(what: str, found: object) -> float:
    """Return `found` as a float, finite or infinite. Numbers of torch and numpy are allowed, bools and strings are not.

    Raises:
        ConfigError: if `found` is not a number; the message calls it `what`.
    """
    if isinstance(found, bool | str) or not hasattr(found, "__float__"):
        raise ConfigError(f"{what} is {shown(found)}; it must be a number.")
    return float(found)


def text(what: str, found: str) -> str:
    """Return `found` if UTF-8 can encode it, otherwise raise a ConfigError."""
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is {shown(found)}; it must be text that UTF-8 can encode.") from None
    return found


def need(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or raise an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        name = module.split(".")[0]
        raise MaskConnectError(f"{name} is not installed; run: pip install 'maskconnect[{extra}]'") from None
