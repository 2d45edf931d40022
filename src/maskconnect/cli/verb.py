"""Verbs of the command line, each with a help that has an example."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


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
