"""The argument parser of all commands: its errors are one sentence, with the nearest valid name."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from maskconnect.cli.hints import hint
from maskconnect.errors import ConfigError, cut, unknown_name

TYPES = {"int": "an integer", "float": "a number"}
"""How errors name the types of values."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps descriptions as they are, and leaves room for the longest command name."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an argument; argparse forgets that commands are indented."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our errors, and suggests the nearest valid name."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._typed: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with what to type instead of an unknown option."""
        message = re.sub(
            r"argument (\S+): invalid (\w+) value: (.+)",
            lambda found: f"{found[1]} is {found[3]}; it must be {TYPES.get(found[2], found[2])}",
            message,
        )
        message = re.sub(r"argument (\S+): expected (one|at least one) argument", r"\1 needs a value", message)
        message = message.replace("the following arguments are required:", "missing:")
        message = message.replace("unrecognized arguments: -", "unknown option: -")
        message = message.replace("unrecognized arguments:", "unexpected argument:")
        if message.startswith("missing: ") and (wrong := self._first_unknown()):  # argparse tells what is missing first
            message = f"unknown option: {cut(wrong)}"
        unknown = message.startswith("unknown option: ")
        found = hint(message.split()[2:], self.options()) if unknown else ""
        raise ConfigError(f"{message}; {found or f'see: {self.prog} --help'}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but let the parser of a command reject unknown options: it knows the right ones."""
        self._typed = [str(word) for word in (sys.argv[1:] if args is None else args)]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _first_unknown(self) -> str | None:
        """Return the first option of the command line that does not exist."""
        known = self.options()
        flags = (word.partition("=")[0] for word in self._typed if word.startswith("--"))
        return next((flag for flag in flags if flag not in known), None)

    def options(self) -> set[str]:
        """Return all options, including those of every command."""
        found: set[str] = set()
        for action in self._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                found.update(*(verb.options() for verb in action.choices.values()))
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = action.option_strings[0] if action.option_strings else f"the {str(action.metavar).lower()}"
            raise unknown_name(what, value, map(str, action.choices))
