"""The command `maskconnect`: find the verb, run it, and turn what goes wrong into one line and an exit code.

0 all is well, 1 something was lost (a rank, a process that loads images) and a new start goes on, 2 a mistake that the
user can mend, 130 Ctrl-C, 143 SIGTERM, 141 nobody reads the output any more; 140 (SIGUSR2 on Linux) the time of a job
is nearly up, and the run has saved.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from maskconnect import __version__
from maskconnect.cli import (
    bench,
    compare,
    data,
    demo,
    evaluate,
    export,
    predict,
    prune,
    recipes,
    report,
    reproduce,
    sweep,
    train,
)
from maskconnect.cli.hints import hint
from maskconnect.errors import (
    ConfigError,
    LostRankError,
    LostWorkerError,
    MaskConnectError,
    ToldElsewhereError,
    printable,
    unknown_name,
)
from maskconnect.training.stop import PARENT, came_early

LONGEST_LINE = 4000
"""How many characters of an error or a warning are printed; several paths fit into them."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are errors like all of ours, with the nearest right name."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with what to type instead of an option that is not known."""
        unknown = message.startswith("unrecognized arguments: -")
        found = hint(message.split()[2:], self.options()) if unknown else ""
        raise ConfigError(f"{message}; {found or f'see: {self.prog} --help'}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in argparse, but the parser of a verb complains itself: it knows which options the verb has."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def options(self) -> set[str]:
        """All options, those of every verb too."""
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be no text at all
    interrupts = _Interrupts()
    came_early.clear()
    _end_with_parent()
    try:
        code = 0
        with (
            _signals_raise(interrupts),
            _warnings_in_a_line(),
            contextlib.suppress(SystemExit),
        ):  # with which argparse ends after help and version
            words = sys.argv[1:] if argv is None else argv
            args = _parser().parse_args(words or ["--help"])
            code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except _TerminatedError as terminated:
        return _fail(128 + terminated.number, "terminated")
    except BaseException as error:
        return _fail(130, "interrupted") if interrupts.came else _explained(error)


def _explained(error: BaseException) -> int:
    """One line about a mistake that the user can mend, and its exit code; all else is raised again."""
    if isinstance(error, ToldElsewhereError):
        return 2
    if isinstance(error, LostRankError | LostWorkerError):
        return _fail(1, f"error: {error}")
    if isinstance(error, MaskConnectError):
        return _fail(2, f"error: {error}")
    if isinstance(error, BrokenPipeError):
        # Python would flush once more at its end, and complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if _is_out_of_memory(error):
        return _fail(2, "error: that does not fit into memory; take a smaller batch, smaller images or fewer of them.")
    if isinstance(error, OSError):
        return _fail(2, f"error: {error.filename or 'the system'}: {error.strerror or error}; mend that and try again.")
    raise error


def _is_out_of_memory(error: BaseException) -> bool:
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


def _end_with_parent() -> None:
    """A run of a sweep should not outlive it: where Linux can, SIGTERM comes when the parent is gone."""
    parent = os.environ.pop(PARENT, "")
    if not parent.isdigit() or sys.platform != "linux":
        return
    import ctypes

    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before
        sys.exit(143)


class _TerminatedError(BaseException):
    """SIGTERM or SIGUSR2 came; raised so that whatever is under way cleans up behind itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _parser() -> Parser:
    parser = Parser(
        prog="maskconnect",
        description="Learn which modules of a network feed which others.",
        epilog="examples:\n  maskconnect recipes\n  maskconnect train quick/digits",
    )
    parser.add_argument("--version", action="version", version=f"maskconnect {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for command in (
        demo,
        train,
        sweep,
        reproduce,
        evaluate,
        compare,
        report,
        prune,
        predict,
        export,
        recipes,
        data,
        bench,
    ):
        command.add_to(verbs)
    return parser


class _Interrupts:
    """Ctrl-C, and whether it came: some libraries turn it into errors of their own when it comes as they are loaded."""

    came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def _signals_raise(interrupts: _Interrupts) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    signal.signal(signal.SIGTERM, _raise_terminated)
    signal.signal(signal.SIGUSR2, _raise_terminated)
    if before[0][1] is not signal.SIG_IGN:  # as shells start what runs in the background
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Warnings as a person reads them: without file, line and source."""

    def show(message: Warning | str, *_: Any) -> None:
        _say(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    came_early.append(number)
    raise _TerminatedError(number)


def _fail(code: int, line: str) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # so that the line comes last where both go to the same place
    with contextlib.suppress(OSError):
        _say(" ".join(line.splitlines()))
    return code


def _say(line: str) -> None:
    """A line on standard error, in one piece; with the rank, of processes that torchrun has started."""
    who = "" if train.is_first() else f"rank {os.environ['RANK']}: "
    sys.stderr.write(f"{who}{printable(line[:LONGEST_LINE])}\n")
    sys.stderr.flush()
