"""Helpers that all commands share: help with examples, one-line messages, output folders."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from maskconnect.errors import ConfigError, printable


def add_verb(
    verbs: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Add a command that calls `run`, which returns the exit code or None for 0."""
    text = textwrap.fill(f"{about[0].upper()}{about[1:]}.", 79)
    verb = verbs.add_parser(name, help=about, description=text, epilog=f"examples:\n  maskconnect {examples}")
    assert isinstance(verb, argparse.ArgumentParser)
    verb.set_defaults(run=run)
    return verb


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line that may contain names from files; control characters are escaped."""
    print(printable(text), file=file, flush=True)


def check_writable(out: Path) -> None:
    """Fail before the work, not after it, if the folder cannot be created or written."""
    parent = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"{out} cannot be written, because {parent} is not writable; choose another folder with --out."
        )
