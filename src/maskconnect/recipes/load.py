"""Find a recipe by its name or file, lay the layers of it over each other, and check the whole.

A file holds one recipe, or what several have in common and a `[variant.NAME]` table for each. `base = "NAME"` starts
from another recipe. Later layers win: base, file, variant, command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError, unknown_name
from maskconnect.recipes.fields import read
from maskconnect.recipes.schema import Recipe

HOME = Path(__file__).parent
FOLDERS = ("quick", "paper")
Table = dict[str, Any]


def names() -> tuple[str, ...]:
    """The recipes that come with maskconnect."""
    return tuple(_shipped())


def load(name: str, settings: Iterable[str] = ()) -> Recipe:
    """The recipe called `name` (or in that file), with settings such as `model.fan_in=4` laid over it."""
    table = _table(name, ())
    for setting in settings:
        set_field(table, setting)
    try:
        return read(Recipe, {"name": _called(name), **table})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def in_file(path: Path) -> list[str]:
    """The names of all recipes in a file, as `load` takes them."""
    variants = _parse(path).get("variant")
    return [f"{path}:{variant}" for variant in variants] if variants else [str(path)]


def set_field(table: Table, setting: str) -> None:
    """Lay one `path.to.field=value` over a recipe; a phase is found by its name, as in `phase.learn.epochs=2`."""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {setting}: needed is FIELD=VALUE, such as model.fan_in=4.")
    place: Any = table
    for depth, key in enumerate(keys[:-1]):
        if isinstance(place, list):
            place = _named(place, key, ".".join(keys[:depth]))
        else:
            place = place.setdefault(key, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {setting}: {'.'.join(keys[: depth + 1])} is no table.")
    if isinstance(place, list):
        raise ConfigError(f"--set {setting}: name a field of it, such as {path.strip()}.epochs=2.")
    place[keys[-1]] = _parsed(text.strip())


def _called(name: str) -> str:
    """What runs of this recipe are called."""
    if name in _shipped():
        return name
    path, _, variant = name.rpartition(":") if _is_variant(name) else (name, "", "")
    return variant or Path(path).stem


def _is_variant(name: str) -> bool:
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".toml")


@cache
def _shipped() -> dict[str, tuple[Path, str]]:
    """The file of every recipe that comes with maskconnect, and which variant it is."""
    found: dict[str, tuple[Path, str]] = {}
    for folder in FOLDERS:
        for path in sorted((HOME / folder).glob("*.toml")):
            for name in _parse(path).get("variant", {"": None}):
                found[f"{folder}/{name or path.stem}"] = path, name
    return found


def _table(name: str, through: Sequence[str]) -> Table:
    """The layers of a recipe, as one table."""
    if name in through:
        raise ConfigError(f"{name}: its base leads back to itself, through {', '.join(through)}.")
    if name in _shipped():
        path, variant = _shipped()[name]
    elif _is_variant(name):
        file, _, variant = name.rpartition(":")
        path = Path(file)
    elif name.endswith(".toml"):
        path, variant = Path(name), ""
    else:
        raise unknown_name("the recipe", name, names(), or_else=", or a file that ends in .toml")
    table = deepcopy(_parse(path))
    variants = table.pop("variant", {})
    if variants and variant not in variants:
        choice = ", ".join(f"{path}:{each}" for each in variants)
        raise ConfigError(f"{path} holds several recipes; name one of them: {choice}.")
    if variant and not variants:
        raise ConfigError(f"{path} holds one recipe, and no variant {variant!r}.")
    base = table.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base is {base!r}; it must be the name of a recipe.")
        if base.endswith(".toml"):
            base = str(path.parent / base)
        table = merged(_table(base, (*through, name)), table)
    return merged(table, variants.get(variant, {}))


def merged(below: Table, above: Table) -> Table:
    """Two layers as one: tables are joined, all else (the list of phases too) is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            value = merged(old, value)
        result[key] = value
    return result


def _parse(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a recipe or a file that is there.") from None


def _parsed(text: str) -> Any:
    """A value as TOML writes it; a text needs no quotation marks."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _named(tables: list[Any], key: str, path: str) -> Any:
    found = {str(table.get("name")): table for table in tables if isinstance(table, dict)}
    if key not in found:
        raise unknown_name(f"the name in {path}", key, found)
    return found[key]
