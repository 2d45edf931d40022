"""Read plain tables into dataclasses. Unknown keys, missing keys and values of another type are errors."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from maskconnect.errors import LONGEST, ConfigError, cut, shown, text

T = TypeVar("T")


MOVED = {
    "model.mask_credit": "learning.credit",
    "training.mask_gradient": "learning.gradient",
    "phase.temperature": "learning.temperature",
    "phase.cool_to": "learning.cool (true or false)",
    "phase.blend": 'learning.way (way = "blend")',
    "phase.even": "learning.uniform_floor",
}
"""The new names of fields of version 0.1."""
REMOVED = {"training.mask_momentum": "masks have no momentum"}


def read(kind: type[T], table: object, path: str = "") -> T:
    """Return the dataclass `kind` with the values of a table; `path` names the table in errors."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path or 'the recipe'} is {shown(table)}; it must be a table.")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise unknown_field(path, key, {**_one_below(kind, table), **{name: name for name in known}})
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_join(path, name)} is missing; it has no default, so set it.")
    hints = get_type_hints(kind)
    values = {key: _value(hints[key], value, _join(path, key)) for key, value in table.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        if str(error).startswith(path):
            raise
        raise ConfigError(f"{path}.{error}") from None


def unknown_field(path: str, key: str, known: Mapping[str, str]) -> ConfigError:
    """Return the error for a key that is not a field, with the nearest of the fields `known` by their last part."""
    old = f"{path.partition('.')[0]}.{key}"
    if old in MOVED:
        return ConfigError(f"{_join(path, key)} is now {MOVED[old]}; rename it, or run tools/new_format.py.")
    if old in REMOVED:
        return ConfigError(f"{_join(path, key)} was removed: {REMOVED[old]}. Remove it from the recipe.")
    near = difflib.get_close_matches(key[:LONGEST], known, n=1)
    here = [name for name, full in known.items() if name == full]
    hint = f"did you mean `{_join(path, known[near[0]])}`?" if near else f"{path or 'a recipe'} has: {', '.join(here)}."
    return ConfigError(f"unknown field `{_join(path, key)}`; {hint}")


def _one_below(kind: type, table: dict[str, Any]) -> dict[str, str]:
    """Return the full names of the fields of inner tables by their last part, and of the tables in a list by name.

    Of a list, the fields are those of its first table.
    """
    found: dict[str, str] = {}
    for path, inner in get_type_hints(kind).items():
        if get_origin(inner) is tuple:
            inner, rows = get_args(inner)[0], table.get(path)
            named = [str(row.get("name")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
            found |= {name: f"{path}.{name}" for name in named}
            path = f"{path}.{named[0]}" if named else path
        if is_dataclass(inner):
            found |= {field.name: f"{path}.{field.name}" for field in fields(inner)}
    return found


def _value(kind: Any, value: Any, path: str) -> Any:
    """Return `value`, checked and converted to `kind`."""
    if kind is Any:
        return value
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value == "none" and _NONE in options:  # TOML has no null
        return None
    for option in options:
        if option is type(None):
            continue
        if is_dataclass(option):
            return read(option, value, path)  # type: ignore[arg-type]
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            return _items(option, value, path)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return value if isinstance(value, float) else _as_float(value, path)
        if option in (int, str, bool) and type(value) is option:
            return text(path, value) if option is str else value
    wanted = " or ".join(NAMES.get(get_origin(option) or option, "") for option in options if option is not _NONE)
    raise ConfigError(f"{path} is {shown(value)}; it must be {wanted}.")


def _as_float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(
            f"{path} is an integer of {value.bit_length()} bits; the largest float is about 1.8e308."
        ) from None


def _items(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if kinds[-1] is ...:
        names = [item.get("name", i) if isinstance(item, dict) else i for i, item in enumerate(value)]
        return tuple(_value(kinds[0], item, _join(path, str(name))) for name, item in zip(names, value, strict=True))
    if len(value) != len(kinds):
        raise ConfigError(f"{path} is {shown(value)}; it must have {len(kinds)} values.")
    return tuple(_value(k, item, path) for k, item in zip(kinds, value, strict=True))


_NONE = type(None)
NAMES: dict[Any, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false", tuple: "a list"}


def _join(path: str, key: str) -> str:
    return f"{path}.{cut(key)}" if path else cut(key)
