"""What went wrong, for the user: what was found, what was needed, what to do."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Iterable
from types import ModuleType

LONGEST = 80
"""How many characters of a value an error repeats."""


class MaskConnectError(Exception):
    """Any mistake that the caller can mend; every error that maskconnect raises on purpose is one."""


class ConfigError(MaskConnectError):
    """An argument that cannot be meant."""


class ConnectivityError(MaskConnectError):
    """A wiring, a mask or a pair of shapes that does not fit the network."""


class DataError(MaskConnectError):
    """Data that is missing, damaged, or not what its name says."""


class CheckpointError(MaskConnectError):
    """A saved state that is damaged, cannot be written, or belongs to another network."""


class ToldElsewhereError(MaskConnectError):
    """Another process of the same run has said it already."""


class LostRankError(MaskConnectError):
    """Another process of the same run has gone; a new start goes on from the last checkpoint."""


class LostWorkerError(MaskConnectError):
    """A process that loads images was killed; a new start, with fewer of them, goes on from the last checkpoint."""


def cut(text: str) -> str:
    """A text for an error, which repeats no more than the first LONGEST characters of it."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def shown(found: object) -> str:
    """A value for an error: as Python writes it, and cut where that is long."""
    try:
        return cut(repr(found))
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4,300 digits
        return f"a {type(found).__name__} too large to show"


def printable(text: str) -> str:
    """A text that a terminal shows and does not obey: line ends, escape codes and the like become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unknown_name(what: str, found: object, known: Iterable[str], *, or_else: str = "") -> ConfigError:
    """The error for a name that is none of `known`, with the nearest of them."""
    names = list(map(cut, known))
    near = difflib.get_close_matches(found[:LONGEST], names, n=1) if isinstance(found, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{what} is {shown(found)}; it must be one of {', '.join(names)}{or_else}.{hint}")


def integer(what: str, found: object) -> int:
    """`found` as an integer (numpy's too, but no bool and no float), or the error that names it."""
    try:
        if isinstance(found, bool):
            raise TypeError
        return operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{what} is {shown(found)}; it must be an integer.") from None


def number(what: str, found: object) -> float:
    """`found` as a finite or infinite number (of torch and numpy too, but no bool and no string), or the error."""
    if isinstance(found, bool | str) or not hasattr(found, "__float__"):
        raise ConfigError(f"{what} is {shown(found)}; it must be a number.")
    return float(found)


def text(what: str, found: str) -> str:
    """`found`, if a file can hold it."""
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is {shown(found)}; it must be valid text, which UTF-8 can encode.") from None
    return found


def need(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or say in one sentence which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        name = module.split(".")[0]
        raise MaskConnectError(f"{name} is not installed; run: pip install 'maskconnect[{extra}]'") from None
