"""The command `maskconnect`: parse the command line, run the command, and turn errors into one line and an exit code.

Exit codes: 0 success; 1 a process was lost (a rank, or one that loads images), the same command resumes; 2 an error
that the user can fix; 130 Ctrl-C; 140 (SIGUSR2 on Linux) the time of a job is nearly up, and the run has saved; 141
nobody reads the output; 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

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
from maskconnect.cli.parser import Parser
from maskconnect.errors import (
    LostRankError,
    LostWorkerError,
    MaskConnectError,
    ReportedElsewhereError,
    printable,
)
from maskconnect.training.stop import PARENT, early_signals

LONGEST_LINE = 4000
"""How many characters of an error or a warning are printed: enough for several paths."""


ABOUT = """\
Learn which modules of a network feed which others, then prune and export the result.
Start with `maskconnect demo` (about three minutes), or with `maskconnect train quick/digits`."""

EXAMPLES = """\
examples:
  maskconnect demo
  maskconnect recipes
  maskconnect train quick/digits
  maskconnect train --help"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    interrupts = _Interrupts()
    early_signals.clear()
    _end_with_parent()
    try:
        code = 0
        with (
            _signals_raise(interrupts),
            _warnings_in_a_line(),
            contextlib.suppress(SystemExit),
        ):  # argparse exits after --help and --version
            words = sys.argv[1:] if argv is None else argv
            args = command_parser().parse_args(words or ["--help"])
            code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except _TerminatedError as terminated:
        return _fail(128 + terminated.number, "terminated")
    except BaseException as error:
        return _fail(130, "interrupted") if interrupts.received else _explained(error)


def _explained(error: BaseException) -> int:
    """Print one line about an error that the user can fix, and return its exit code; raise all others again."""
    if isinstance(error, ReportedElsewhereError):
        return 2
    if isinstance(error, LostRankError | LostWorkerError):
        return _fail(1, f"error: {error}")
    if isinstance(error, MaskConnectError):
        return _fail(2, f"error: {error}")
    if isinstance(error, BrokenPipeError):
        # Python flushes again at exit, and would print an error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if _is_out_of_memory(error):
        return _fail(2, "error: out of memory; use a smaller batch, smaller images, or fewer images.")
    if isinstance(error, OSError):
        return _fail(2, f"error: {error.filename or 'the system'}: {error.strerror or error}; fix this and retry.")
    raise error


def _is_out_of_memory(error: BaseException) -> bool:
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


def _end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent process ends, so that no run outlives its sweep."""
    parent = os.environ.pop(PARENT, "")
    if not parent.isdigit() or sys.platform != "linux":
        return
    import ctypes

    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGTERM)
    if os.getppid() != int(parent):  # it had already ended
        sys.exit(143)


class _TerminatedError(BaseException):
    """Raised on SIGTERM or SIGUSR2, so that running code cleans up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def command_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="maskconnect",
        description=ABOUT,
        epilog=EXAMPLES,
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
    """Handle Ctrl-C, and remember it: some libraries turn it into other errors while they are imported."""

    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def _signals_raise(interrupts: _Interrupts) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signal handlers can only be set there
        yield
        return
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    signal.signal(signal.SIGTERM, _raise_terminated)
    signal.signal(signal.SIGUSR2, _raise_terminated)
    if before[0][1] is not signal.SIG_IGN:  # shells ignore it in background jobs
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings in one line, without file, line number and source."""

    def show(message: Warning | str, *_: Any) -> None:
        _say(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    early_signals.append(number)
    raise _TerminatedError(number)


def _fail(code: int, line: str) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # so that this line comes last if both streams go to one place
    with contextlib.suppress(OSError):
        _say(" ".join(line.splitlines()))
    return code


def _say(line: str) -> None:
    """Write a line to standard error in one piece, with the rank if torchrun started this process."""
    who = "" if train.is_first() else f"rank {os.environ['RANK']}: "
    sys.stderr.write(f"{who}{printable(line[:LONGEST_LINE])}\n")
    sys.stderr.flush()
