"""The file of results: each table is written by the command that computed it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError
from maskconnect.experiments.layout import Table
from maskconnect.experiments.sweep import Outcome
from maskconnect.reading import read_text
from maskconnect.training.environment import environment
from maskconnect.training.files import write_atomically
from maskconnect.training.folder import RunFolder
from maskconnect.training.options import Options

OPENING = """# Results
Written by `maskconnect reproduce`, never by hand: each section is replaced when its command is run again.
"""


def provenance(outcomes: Sequence[Outcome], command: str) -> list[str]:
    """Say where numbers come from: the command, recipes, seeds, dates, commits and machines of the runs."""
    ended = [outcome for outcome in outcomes if outcome.summary is not None]
    starts = [
        start
        for outcome in ended
        for start in (outcome.result.starts if outcome.result is not None else RunFolder(outcome.folder).starts())
    ]
    recipes = dict.fromkeys(" ".join([o.cell.source, *o.cell.settings]) for o in outcomes)
    seeds = sorted({outcome.cell.recipe.seed for outcome in ended})
    dates = sorted(str(start.get("time", ""))[:10] for start in starts)
    found = {
        "command": f"`{command}`",
        "recipes": ", ".join(f"`{recipe}`" for recipe in recipes),
        "seeds": ", ".join(map(str, seeds)) or "none has finished",
        "dates": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "",
        "commits": ", ".join(sorted({_commit(start) for start in starts})),
        "machine": ", ".join(sorted({_machine(start) for start in starts})),
    }
    return [f"{key}: {value}" for key, value in found.items() if value]


def provenance_here(command: str, options: Options) -> list[str]:
    """Say where numbers that this process computed come from."""
    start = environment(options)
    found = {
        "command": f"`{command}`",
        "date": str(start["time"])[:10],
        "commit": _commit(start),
        "machine": _machine(start),
    }
    return [f"{key}: {value}" for key, value in found.items()]


def _commit(start: dict[str, Any]) -> str:
    """Shorten the commit; a + means that files had changed since."""
    found = str(start.get("commit") or "no checkout")
    return found[:12] + "+" * found.endswith("+")


def _machine(start: dict[str, Any]) -> str:
    where = start.get("cuda") if start.get("device") != "cpu" and start.get("cuda") else f"CPU {start.get('cpu')}"
    precision = f", {start['precision']}" if "precision" in start else ""
    return f"{where}{precision}, {start.get('threads')} threads, torch {start.get('torch')}"


def check_place(place: Path) -> str:
    """Return the text of a file of results, or the opening of a new one; fail if results cannot be written there."""
    if not place.parent.is_dir():
        raise ConfigError(f"--results {place}: the folder {place.parent} does not exist; create it first.")
    try:
        text = read_text(place) if place.exists() else OPENING
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--results {place} cannot be read: {error}; name a Markdown file.") from None
    if not text.startswith(OPENING):
        raise ConfigError(f"--results {place} exists and is not a maskconnect file of results; name another file.")
    return text


def record(place: Path, name: str, scale: str, table: Table, lines: Sequence[str]) -> None:
    """Write a table to the file of results, replacing an older one of the same name and scale."""
    text = check_place(place)
    section = "\n".join([f"## {name}, {scale} scale", "", table.markdown(), *(f"- {line}" for line in lines), ""])
    older = re.compile(rf"^## {re.escape(name)}, {scale} scale\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    text = older.sub(lambda _: f"{section}\n", text) if older.search(text) else f"{text.rstrip()}\n\n{section}\n"
    write_atomically(place, text.rstrip() + "\n")
