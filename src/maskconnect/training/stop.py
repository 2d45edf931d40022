"""Requests to stop a run. After SIGTERM or Ctrl-C it finishes the step, saves, and says how to resume.

A second signal stops it at once. Batch systems send SIGUSR2 before a job's time ends; a second SIGUSR2 does nothing.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

LOST_WORKER = 1
"""Instead of a signal: a rank lost a process that loads images. A signal to any rank takes precedence."""

PARENT = "MASKCONNECT_PARENT"
"""The environment variable with the id of a process that a run should not outlive."""

early_signals: list[int] = []
"""Signals that arrived before a run could handle them; one raised during an import could be lost."""


class Stopped(Exception):  # noqa: N818 (not an error)
    """A run was asked to stop, and has saved its state."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


class StopRequests:
    """A context that notes signals; `check` raises when the run can stop."""

    def __init__(self) -> None:
        self.asked: int | None = early_signals[0] if early_signals else None
        self.patient = False  # whether a second signal is ignored
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # handlers can only be set there
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Stopped` if a signal arrived."""
        if self.asked is not None:
            raise Stopped(self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = number
            return
        if number == signal.SIGUSR2 or self.patient:
            return
        handler = self._before[number]
        signal.signal(number, handler)
        if callable(handler):
            handler(number, frame)
