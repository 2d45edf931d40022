"""What a person sees of a run while it goes on: a bar on a terminal, plain lines elsewhere, or nothing."""

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
"""Columns of a terminal below which the line beside the bar is a short one."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    phase: str
    epoch: int  # of the whole run, from 1
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float  # in %, on the training images of this epoch so far
    images_per_second: float
    seconds_left: float | None
    waiting_for_data: float = 0.0  # in % of the time

    def text(self, *, short: bool = False) -> str:
        """In words; `short` where there is little room."""
        left = "" if self.seconds_left is None else f"  {duration(self.seconds_left)} left"
        if short:
            return f"{self.phase}: epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}{left}"
        slow = f" ({self.waiting_for_data:.0f} % of the time waiting for data)" if self.waiting_for_data >= 10 else ""
        return (
            f"{self.phase}: epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}  train {self.accuracy:5.1f} %  "
            f"{self.images_per_second:,.0f} images/s{slow}{left}"
        )


class Shown(Protocol):
    """How far something is, for whoever shows it."""

    @property
    def step(self) -> float:
        """So far."""

    @property
    def steps(self) -> float:
        """In all."""

    def text(self, *, short: bool = False) -> str:
        """In words."""


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing; what the others show is this, with something in it."""

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, now: Shown) -> None:
        """A step was taken."""

    def line(self, text: str) -> None:
        """Something that stays on the screen."""


class Lines(Silent):
    """Plain lines on standard output: what happens, and now and then how far the run is."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def progress(self, now: Shown) -> None:
        """A line, if the last one was long ago."""
        if time.monotonic() - self._last > LINE_EVERY:
            self.line(now.text())

    def line(self, text: str) -> None:
        """Print it."""
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
    """A bar on a terminal, lines elsewhere."""
    return Bar() if sys.stdout.isatty() else Lines()


def duration(seconds: float) -> str:
    """A time as people say it: 45 s, 3:20, 2:05:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
