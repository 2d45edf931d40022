"""SIGTERM and Ctrl-C ask a run to stop: it ends the step, saves, and says how to go on. A second one stops at once.

So does SIGUSR2, which batch systems send some time before the end of a job's time; a second one of these does nothing.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

LOST_WORKER = 1
"""In the place of a signal: a rank has lost a process that loads images. A signal to any rank counts for more."""

PARENT = "MASKCONNECT_PARENT"
"""The variable that names the process that a run should not outlive: killed or hung up, it takes its runs along."""

came_early: list[int] = []
"""Signals that came before a run could note them: one that is raised while a library is loaded may be lost there."""


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A run was asked to stop, and has saved what it had."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


class StopRequests:
    """Within this context the signals are noted, and `check` raises once the run may stop."""

    def __init__(self) -> None:
        self.asked: int | None = came_early[0] if came_early else None
        self.patient = False  # whether a second signal is no more than the first
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Stop here if asked to."""
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
