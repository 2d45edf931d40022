"""A recipe as TOML, every field of it, ready to be read again."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from maskconnect.recipes.schema import Recipe


def write(recipe: Recipe) -> str:
    """The resolved recipe, with a header that says where it is from and how to run it."""
    lines = [f"# {recipe.about}" if recipe.about else f"# {recipe.name}"]
    if recipe.paper is not None:
        lines.append(f"# Paper, {recipe.paper.where}: {_claim(recipe)}")
    lines += [f"# maskconnect train {recipe.name}", ""]
    tables: list[str] = []
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if value is None:
            continue
        if is_dataclass(value):
            tables += ["", f"[{field.name}]", *_lines(value)]
        elif isinstance(value, tuple):
            for item in value:
                tables += ["", f"[[{field.name}]]", *_lines(item)]
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines + tables) + "\n"


def _claim(recipe: Recipe) -> str:
    """What the paper reports, in words."""
    paper = recipe.paper
    assert paper is not None
    if paper.accuracy is None:
        return "only in the figure."
    parts = [f"{paper.accuracy:.2f} %"]
    if paper.mean is not None:
        parts.append(f"best of 4 runs; mean {paper.mean:.2f}" + (f" +- {paper.std:.2f}" if paper.std else ""))
    if paper.top5 is not None:
        parts.append(f"top-5 {paper.top5:.2f} %")
    return ", ".join(parts) + "."


def _lines(table: Any) -> list[str]:
    pairs = [(field.name, getattr(table, field.name)) for field in fields(table)]
    return [f"{name} = {_toml(value)}" for name, value in pairs if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a TOML text is a JSON text, but for DEL
    return repr(value)
