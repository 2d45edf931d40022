"""Run cells with an engine: start them, watch them, and stop them when asked."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.experiments.engine import Engine, Job
from maskconnect.experiments.grid import Cell
from maskconnect.experiments.kept import Kept
from maskconnect.training.folder import RunFolder
from maskconnect.training.progress import Silent, duration
from maskconnect.training.stop import Stopped, StopRequests

GRACE = 20.0
"""Seconds that runs have for saving if this process fails."""


@dataclass(frozen=True)
class Overall:
    """The progress of the whole grid, in the form that `Silent.progress` takes."""

    step: float
    steps: float
    ended: int
    running: int
    waiting: int
    left: float | None  # seconds

    def text(self, *, short: bool = False) -> str:
        """Describe the progress in words."""
        left = "" if self.left is None else f", {duration(self.left)} left"
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        return f"{self.ended} of {self.steps:.0f} runs finished, {self.running} running{waiting}{left}"


class Runner:
    """Gives the cells of a sweep to an engine, and waits for them."""

    def __init__(
        self,
        engine: Engine,
        out: Path,
        todo: list[Cell],
        total: int,
        show: Silent,
        requests: StopRequests,
        kept: Kept | None,
    ) -> None:
        self.engine, self.out, self.todo, self.total = engine, out, list(todo), total
        self.show, self.requests, self.kept = show, requests, kept
        self.running: list[Job] = []
        self.failed: dict[str, str] = {}
        self.ended = total - len(todo)  # with or without a result
        self.failed_values: set[tuple[str, ...]] = set()  # the values of cells that failed
        self.work = 0.0  # the number of cells that this process has finished, counting parts
        self.looked, self.busy = time.monotonic(), 0.0  # the last look, and for how long jobs were running

    def run(self) -> dict[str, str]:
        """Run all cells; return why each failed cell failed."""
        try:
            while self.todo or self.running:
                if self.requests.asked is None:
                    self.start(self.engine.at_once - len(self.running))
                self.look()
                if self.requests.asked is not None:
                    self.stop(self.requests.asked)
                time.sleep(self.engine.poll)
        finally:
            self.end_all()  # after a second signal, or an error here
        return self.failed

    def start(self, room: int) -> None:
        """Start the next cells, if there is room."""
        if self.todo and room > 0:
            now, self.todo = self.todo[:room], self.todo[room:]
            for job in self.engine.start(now, self.out):
                self.running.append(job)  # at once, so that it is ended if the next one cannot start

    def look(self) -> None:
        """Find the jobs that have ended, and show the progress of the others."""
        for job in list(self.running):
            if (end := job.end()) is not None:
                self.running.remove(job)
                self.ended += 1
                self.note(job, end)
        self.show_messages()
        waiting = sum(job.waiting for job in self.running)
        now = time.monotonic()
        self.busy += (now - self.looked) * (len(self.running) > waiting)
        self.looked = now
        shares = [job.share_done() for job in self.running]
        work = self.work + sum(share - job.done_before for share, job in zip(shares, self.running, strict=True))
        done = self.ended + sum(shares)
        left = (self.total - done) * self.busy / work if work > 0.02 else None
        self.show.progress(Overall(done, self.total, self.ended, len(self.running) - waiting, waiting, left))

    def show_messages(self) -> None:
        """Print the messages of the engine."""
        while self.engine.messages:
            self.show.line(self.engine.messages.pop(0))

    def note(self, job: Job, end: int | str) -> None:
        """Print the result of a cell, or why it failed."""
        folder = RunFolder(job.folder)
        other = other_recipe(folder, job.cell) if end == 0 and folder.finished else ""
        if end == 0 and folder.finished and not other:
            self.work += 1 - job.done_before
            test = folder.summary()["test"]["top1"]
            keep_result(folder, self.kept)
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name}: test accuracy {test:.2f} %")
        elif self.requests.asked is None:
            self.failed[job.cell.name] = why = other or job.reason(end)
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name} FAILED: {why}")
            self.failed_values.add(job.cell.values)
            if end == 2 and self.engine.one_machine and self.rest_would_fail(why):
                raise ConfigError(
                    f"{why.rstrip('.')}. {len(self.failed)} runs failed like this, and the rest differ only in seeds."
                )

    def rest_would_fail(self, why: str) -> bool:
        """Return whether the rest would fail too: all runs failed for one reason, and the rest differ only in seeds."""
        alike = len(self.failed) > 1 and set(self.failed.values()) == {why} and self.ended == len(self.failed)
        left = [*self.todo, *(job.cell for job in self.running if job.share_done() == job.done_before)]
        at_work = len(self.todo) + len(self.running) - len(left)
        return alike and not at_work and bool(left) and {cell.values for cell in left} <= self.failed_values

    def stop(self, number: int) -> None:
        """Ask all to save and end, wait for them, and stop."""
        count = len(self.running)
        self.show.line(f"stopping {count} run{'s' * (count != 1)}; a second signal stops at once")
        asked = {job.cell.name: _lines(job.folder) for job in self.running}
        reached = self.engine.ask(self.running, number)
        while self.running:
            reached = reached or self.engine.ask(self.running, number)
            self.running = [job for job in self.running if job.end() is None]
            training = [job for job in self.running if _lines(job.folder) > asked[job.cell.name] + 3]
            if training:  # they continue: a library has swallowed the signal
                asked |= {job.cell.name: _lines(job.folder) for job in training}
                self.engine.ask(training, number)
            self.show_messages()
            time.sleep(self.engine.poll)
        raise Stopped(number)

    def end_all(self) -> None:
        """End what still runs: first by a signal, and after some seconds by a kill."""
        if not self.running:
            return
        self.engine.ask(self.running, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while self.running and time.monotonic() < deadline:
            self.running = [job for job in self.running if job.end() is None]
            time.sleep(self.engine.poll)
        self.engine.kill(self.running)
        self.running = []


def _lines(folder: Path) -> int:
    """Return how many lines of metrics a run has written."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def keep_result(folder: RunFolder, kept: Kept | None) -> None:
    """Keep the result of a run, unless it is damaged; its outcome will say so."""
    if kept is not None:
        with suppress(CheckpointError):
            kept.keep(folder)


def other_recipe(folder: RunFolder, cell: Cell) -> str:
    """Say how the recipe of a run differs from that of its cell, which happens if a file changes during a sweep."""
    try:
        folder.check_recipe(cell.recipe)
    except ConfigError as error:
        return str(error).replace(", or add --fresh for a new one", "")
    return ""
