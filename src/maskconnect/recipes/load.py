"""Find a recipe by its name or file, merge its layers, and check the result.

A file holds one recipe, or the common part of several and a `[variant.NAME]` table for each. `base = "NAME"`, in a file
or in a variant, starts from another recipe; the path of a base file is relative to this file. Later layers win: base,
file, variant, command line. In a later layer `phase.learn.epochs = 2` changes one phase, and `[[phase]]` replaces all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any

from maskconnect.errors import LONGEST, ConfigError, cut, shown, unknown_name
from maskconnect.reading import MAX_DEPTH, parse_toml, read_text
from maskconnect.recipes.fields import read
from maskconnect.recipes.schema import Recipe

HOME = Path(__file__).parent
FOLDERS = ("quick", "discover", "strong", "paper")
SAME = ("name", "about", "seed", "init_from")
"""Fields that can change without making the recipe another experiment."""

Table = dict[str, Any]


def names() -> tuple[str, ...]:
    """Return the names of the recipes that come with maskconnect."""
    return tuple(_shipped())


def load(name: str, settings: Iterable[str] = ()) -> Recipe:
    """Return the recipe with this name or in this file, with settings such as `model.fan_in=4` applied."""
    table, settings = _table(name, {}), list(settings)
    changed = [setting for setting in settings if setting.partition("=")[0].strip() not in SAME]
    for setting in settings:
        set_field(table, setting)
    if changed:  # the paper does not report on the changed recipe
        table.pop("paper", None)
        table["about"] = f"{table.get('about') or _called(name)}; changed: {', '.join(map(cut, changed))}"
    try:
        return read(Recipe, {"name": _called(name), **table})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def in_file(path: Path) -> list[str]:
    """Return the names of all recipes in a file, as `load` takes them."""
    variants = _pop_variants(_parse(path), path)
    return [f"{path}:{variant}" for variant in variants] if variants else [str(path)]


def set_field(table: Table, setting: str) -> None:
    """Apply one `path.to.field=value` to a recipe. A phase is found by its name, as in `phase.learn.epochs=2`."""
    path, equals, text = setting.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        raise ConfigError(f"--set {cut(setting)} is not a setting; write FIELD=VALUE, such as model.fan_in=4.")
    change = _parsed(text.strip())
    for key in reversed(keys):
        change = {key: change}
    table.update(_over(f"--set {cut(setting)}", table, change))


def _called(name: str) -> str:
    """Return the name that runs of this recipe get."""
    if name in _shipped():
        return name
    path, _, variant = name.rpartition(":") if _is_variant(name) else (name, "", "")
    return variant or Path(path).stem


def _is_variant(name: str) -> bool:
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".toml")


@cache
def _shipped() -> dict[str, tuple[Path, str]]:
    """Return the file and the variant of every recipe that comes with maskconnect."""
    found: dict[str, tuple[Path, str]] = {}
    for folder in FOLDERS:
        for path in sorted((HOME / folder).glob("*.toml"), key=lambda path: path.stem):
            for name in _pop_variants(_parse(path), path) or [""]:
                found[f"{folder}/{name or path.stem}"] = path, name
    return found


def _place(name: str) -> tuple[Path, str]:
    """Return the file that holds a recipe, and its variant."""
    if name in _shipped():
        return _shipped()[name]
    if _is_variant(name):
        file, _, variant = name.rpartition(":")
        return Path(file), variant
    if name.endswith(".toml"):
        return Path(name), ""
    with suppress(OSError):  # the name is too long for a path
        if (Path(name) / "recipe.toml").is_file():
            raise ConfigError(f"{name} is a run folder; to resume it, train {name}/recipe.toml with --out {name}.")
    known = {each.rpartition("/")[2]: each for each in reversed(names())} | {each: each for each in names()}
    near = difflib.get_close_matches(name[:LONGEST], known, n=1)
    hint = f" Did you mean {known[near[0]]!r}?" if near else ""
    raise ConfigError(
        f"the recipe is {shown(name)}; it must be one that `maskconnect recipes` lists, or a file that ends in "
        f".toml.{hint}"
    )


def _table(name: str, through: dict[tuple[Path, str], str]) -> Table:
    """Return the merged layers of a recipe; `through` are the recipes that have it as their base."""
    path, variant = _place(name)
    table = _parse(path)
    here = path.resolve(), variant
    if here in through:
        raise ConfigError(
            f"{name}: its base leads back to itself: {' -> '.join([*through.values(), name])}. Change one of the bases."
        )
    variants = _pop_variants(table, path)
    if variants and variant not in variants:
        choice = ", ".join(f"{path}:{cut(each)}" for each in variants)
        raise ConfigError(f"{path} holds several recipes; name one of them: {choice}.")
    if variant and not variants:
        raise ConfigError(f"{path} has no variant {shown(variant)}, because it holds a single recipe. Pass {path}.")
    own = dict(variants.get(variant, {}))
    base = table.pop("base", None)
    base = own.pop("base", base)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base is {shown(base)}; it must be the name of a recipe.")
        if base.endswith(".toml") or _is_variant(base):
            base = str(path.parent / base)
        below = _table(base, {**through, here: name})
        for key in ("about", "paper"):  # they describe the base only
            below.pop(key, None)
        table = _over(str(path), below, table)
    return _over(name, table, own)


def _pop_variants(table: Table, path: Path) -> dict[str, Table]:
    """Remove the variants from the table of a file, and return them."""
    variants = table.pop("variant", {})
    if not isinstance(variants, dict) or not all(isinstance(each, dict) for each in variants.values()):
        found = shown(variants)
        raise ConfigError(f"{path}: variant is {found}; it must hold one table per recipe, as [variant.NAME].")
    return variants


def merged(below: Table, above: Table) -> Table:
    """Merge two layers. A table over a list of phases changes the phases that it names; other values replace."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            value = merged(old, value)
        elif isinstance(value, dict) and isinstance(old, list) and old and all(isinstance(part, dict) for part in old):
            value = _with_changes(old, value, key)
        result[key] = value
    return result


def _with_changes(tables: list[Table], changes: Table, key: str) -> list[Table]:
    """Return a list of tables with changes, given by the `name` of a table."""
    found = [str(table.get("name")) for table in tables]
    for name, change in changes.items():
        if name not in found:
            raise unknown_name(f"the name of a {key}", name, found)
        if not isinstance(change, dict):
            raise ConfigError(
                f"{key}.{cut(name)} is {shown(change)}; it must be a table. Set one of its fields instead."
            )
    return [merged(table, changes.get(name, {})) for name, table in zip(found, tables, strict=True)]


def _over(what: str, below: Table, above: Table) -> Table:
    """Return `merged`, with the name of the upper layer in its errors."""
    try:
        return merged(below, above)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def _parse(path: Path) -> Table:
    try:
        return parse_toml(read_text(path, encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Pass the name of a recipe, or a file that exists."
        ) from None
    except ValueError as error:  # invalid UTF-8 or TOML, a number of 5,000 digits, 5,000 brackets
        raise ConfigError(f"{path} is not valid TOML: {str(error).rstrip('.')}. Fix this in the file.") from None


def _parsed(text: str) -> Any:
    """Parse a TOML value; strings need no quotation marks."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    return text if isinstance(value, date | time) else value  # no field is a date, but a name may look like one
