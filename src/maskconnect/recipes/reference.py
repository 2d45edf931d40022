"""The reference of recipe fields as Markdown, from the dataclasses of the schema.

python -m maskconnect.recipes.reference
"""

from __future__ import annotations

import ast
import inspect
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from maskconnect.recipes.fields import NAMES
from maskconnect.recipes.schema import Recipe
from maskconnect.recipes.write import toml

HEAD = """\
# Recipe fields

A recipe is a TOML file. Set a field in the file, or on the command line with `--set`: `--set model.fan_in=4`, or
`--set phase.learn.epochs=2` for the phase named `learn`. Where `"none"` is allowed, it means that the field is not set.
Sections and equations are those of the paper; D1, D2, ... are entries of the project's decisions.
"""
COLUMNS = ("field", "type and allowed values", "default", "meaning")


def markdown() -> str:
    """Return one table per section of a recipe, with the type, the default and the meaning of every field."""
    hints = get_type_hints(Recipe)
    tables = {name: table for name in hints if (table := _table_of(hints[name])) is not None}
    parts = [HEAD, _section("Top level", Recipe, skip=tables)]
    for name, kind in tables.items():
        several = get_origin(hints[name]) is tuple
        title = f"`[[{name}]]`, or `[{name}.NAME]` to change one" if several else f"`[{name}]`"
        parts.append(_section(title, kind))
    return "\n".join(parts)


def meanings(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _section(title: str, kind: type, skip: Any = ()) -> str:
    about = (inspect.getdoc(kind) or "").splitlines()[0]
    said, hints = meanings(kind), get_type_hints(kind, include_extras=True)
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for field in fields(kind):
        if field.name not in skip:
            rows.append((f"`{field.name}`", _type(hints[field.name]), _default(field), said.get(field.name, "")))
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"## {title}\n\n{about}\n\n{table}\n"


def _table_of(hint: Any) -> type | None:
    """Return the dataclass that a field holds, alone or in a tuple."""
    options = (hint, *get_args(hint))
    return next((option for option in options if is_dataclass(option) and isinstance(option, type)), None)


def _type(hint: Any) -> str:
    """Return the type of a field in words, with its allowed values."""
    allowed: Any = ""
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    found = " or ".join(
        NAMES[get_origin(option) or option] for option in options if option in NAMES or get_origin(option)
    )
    if isinstance(allowed, tuple):
        found += (" of " if get_origin(options[0]) is tuple else ": ") + ", ".join(f'`"{name}"`' for name in allowed)
    elif allowed:
        found = f"{found}: {allowed}" if found else allowed
    return f'{found}; or `"none"`' if types.NoneType in options else found


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required"
    if field.default is None:
        return '`"none"`'
    return f"`{toml(field.default)}`"


if __name__ == "__main__":
    print(markdown(), end="")
