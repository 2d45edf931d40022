"""Write a recipe with all of its fields as TOML, and list these fields."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, is_dataclass
from typing import Any

from maskconnect.recipes.schema import Paper, Recipe


def write(recipe: Recipe, command: str = "") -> str:
    """Return the resolved recipe, with a header that describes it and has the command that runs it."""
    header = [recipe.about or recipe.name]
    if recipe.paper is not None:
        header.append(f"Paper, {recipe.paper.where}: {_claim(recipe.paper)}")
    header.append(command or f"maskconnect train {recipe.name}")
    lines = [f"# {_on_one_line(text)}" for text in header] + [""]
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
            lines.append(f"{field.name} = {toml(value)}")
    return "\n".join(lines + tables) + "\n"


def _claim(paper: Paper) -> str:
    """Return the results that the paper reports, in words."""
    if paper.accuracy is None:
        return "no accuracy is stated."
    parts = [f"{paper.accuracy:.2f} %"]
    if paper.mean is not None:
        spread = "" if paper.std is None else f" +- {paper.std:.2f}"
        parts.append(f"the best of its runs; mean {paper.mean:.2f}{spread}")
    if paper.top5 is not None:
        parts.append(f"top-5 {paper.top5:.2f} %")
    return ", ".join(parts) + "."


def _on_one_line(text: str) -> str:
    """Replace characters that end a comment or are not allowed in one by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def _lines(table: Any) -> list[str]:
    pairs = [(field.name, getattr(table, field.name)) for field in fields(table)]
    return [f"{name} = {toml(value)}" for name, value in pairs if value is not None]


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A TOML string is a JSON string, except for DEL and a few other characters.
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
    return repr(value)


def assignments(written: str) -> dict[str, str]:
    """Return the fields of a written recipe with their values as TOML, by the names that `--set` uses."""
    found: dict[str, str] = {}
    for name, value in tomllib.loads(written).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": toml(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}.{item['name']}.{key}": toml(inner) for item in value for key, inner in item.items()}
        else:
            found[name] = toml(value)
    return found
