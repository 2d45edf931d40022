"""What went wrong, for the user: what was found, what was needed, what to do."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Iterable
from types import ModuleType


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


def unknown_name(what: str, found: object, known: Iterable[str], *, or_else: str = "") -> ConfigError:
    """The error for a name that is none of `known`, with the nearest of them."""
    names = list(known)
    near = difflib.get_close_matches(str(found), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{what} is {found!r}; it must be one of {', '.join(names)}{or_else}.{hint}")


def integer(what: str, found: object) -> int:
    """`found` as an integer (numpy's too, but no bool and no float), or the error that names it."""
    try:
        if isinstance(found, bool):
            raise TypeError
        return operator.index(found)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{what} is {found!r}; it must be an integer.") from None


def number(what: str, found: object) -> float:
    """`found` as a finite or infinite number (of torch and numpy too, but no bool and no string), or the error."""
    if isinstance(found, bool | str) or not hasattr(found, "__float__"):
        raise ConfigError(f"{what} is {found!r}; it must be a number.")
    return float(found)


def need(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or say in one sentence which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        name = module.split(".")[0]
        raise MaskConnectError(f"{name} is not installed; run: pip install 'maskconnect[{extra}]'") from None
