"""Print the command-line reference as Markdown: the --help of every command.

.venv/bin/python tools/cli_reference.py > cli.md
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from maskconnect.cli.main import command_parser

WIDTH = 100
OPENING = """# Command line
Everything below is printed by `--help`. Errors that you can fix are one sentence with exit code 2.
"""


def markdown() -> str:
    """Return the page: a section per command, with its help as fenced text."""
    with patch.dict(os.environ, {"COLUMNS": str(WIDTH + 2)}):  # argparse leaves two columns free
        sections = [f"## {parser.prog}\n```text\n{parser.format_help().rstrip()}\n```\n" for parser in parsers()]
    return "\n".join([OPENING, *sections])


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of `maskconnect`, then that of every command and of the commands in it."""
    parser = command_parser() if parser is None else parser
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


if __name__ == "__main__":
    print(markdown(), end="")
