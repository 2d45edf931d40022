"""A recipe as TOML, every field of it, ready to be read again."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from maskconnect.recipes.schema import Paper, Recipe


def write(recipe: Recipe, command: str = "") -> str:
    """The resolved recipe, with a header that says what it is and which command runs it."""
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
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines + tables) + "\n"


def _claim(paper: Paper) -> str:
    """What the paper reports, in words."""
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
    """A text without the characters that end a comment, or may not stand in one."""
    return "".join(character if character.isprintable() else " " for character in text)


def _lines(table: Any) -> list[str]:
    pairs = [(field.name, getattr(table, field.name)) for field in fields(table)]
    return [f"{name} = {_toml(value)}" for name, value in pairs if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A TOML text is a JSON text, but for DEL and the like.
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
    return repr(value)


def assignments(written: str) -> dict[str, str]:
    """The fields of a written recipe, by the names that `--set` has for them."""
    found: dict[str, str] = {}
    table = ""
    for line in written.splitlines():
        key, equals, value = line.partition(" = ")
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif equals and not line.startswith("#"):
            if table.startswith("phase.") and key == "name":
                table = f"phase.{json.loads(value)}."
            found[table + key] = value
    return found
