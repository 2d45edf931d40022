"""What verbs of the command line have in common: a help that has an example, a place to write to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from maskconnect.errors import ConfigError, printable


def add_verb(
    verbs: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    about: str,
    example: str,
) -> argparse.ArgumentParser:
    """A verb that calls `run`, which returns the exit code or nothing."""
    text = f"{about[0].upper()}{about[1:]}."
    verb = verbs.add_parser(name, help=about, description=text, epilog=f"example:\n  maskconnect {example}")
    assert isinstance(verb, argparse.ArgumentParser)
    verb.set_defaults(run=run)
    return verb


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line that may have names from files in it; what a terminal would obey becomes escapes."""
    print(printable(text), file=file, flush=True)


def check_writable(out: Path) -> None:
    """An error if a folder could not be made or written; better now than after the work."""
    parent = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"{out} cannot be written, because {parent} cannot; choose another place by --out.")
