"""Show the progress of a run: as a bar on a terminal, as plain lines elsewhere, or not at all."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from maskconnect.errors import printable

LINE_EVERY = 10.0
"""Seconds between plain lines."""

NARROW = 118
"""The number of terminal columns below which the text beside the bar is shortened."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run."""

    phase: str
    epoch: int  # of the whole run, from 1
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float  # in %, on the training images of this epoch so far
    images_per_second: float
    seconds_left: float | None
    waiting_for_data: float = 0.0  # % of the time

    def text(self, *, short: bool = False) -> str:
        """Return the progress in words; `short` for narrow terminals."""
        left = "" if self.seconds_left is None else f"  {duration(self.seconds_left)} left"
        if short:
            return f"{self.phase}: epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}{left}"
        slow = f" ({self.waiting_for_data:.0f} % of the time waiting for data)" if self.waiting_for_data >= 10 else ""
        return (
            f"{self.phase}: epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}  train {self.accuracy:5.1f} %  "
            f"{self.images_per_second:,.0f} images/s{slow}{left}"
        )


class Shown(Protocol):
    """Progress that can be shown."""

    @property
    def step(self) -> float:
        """The steps so far."""

    @property
    def steps(self) -> float:
        """The number of all steps."""

    def text(self, *, short: bool = False) -> str:
        """Return the progress in words."""


class Silent(AbstractContextManager["Silent"]):
    """Show nothing. Other displays override these methods."""

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, now: Shown) -> None:
        """Show the progress after a step."""

    def line(self, text: str) -> None:
        """Show a line that stays on the screen."""


class Lines(Silent):
    """Plain lines on standard output: events, and the progress every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def progress(self, now: Shown) -> None:
        """Print a line, if the last one is old enough."""
        if time.monotonic() - self._last > LINE_EVERY:
            self.line(now.text())

    def line(self, text: str) -> None:
        """Print a line."""
        self._last = time.monotonic()
        print(printable(text), flush=True)


class Bar(Silent):
    """A bar at the bottom of the terminal, and lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(markup=False, highlight=False)
        self._narrow = self._console.width < NARROW
        bar = BarColumn(bar_width=8 if self._narrow else 20)
        columns = (bar, TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, console=self._console, transient=True, refresh_per_second=4)
        self._task: Any = None

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, now: Shown) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._bar.add_task("", total=now.steps)
        self._bar.update(self._task, completed=now.step, description=printable(now.text(short=self._narrow)))

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(printable(text), soft_wrap=True)


def usual() -> Silent:
    """Return a bar on a terminal, lines elsewhere."""
    return Bar() if sys.stdout.isatty() else Lines()


def duration(seconds: float) -> str:
    """Return a time in the form 45 s, 3:20 or 2:05:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
