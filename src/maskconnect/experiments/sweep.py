"""Run a grid: each cell in a process of its own, several at a time, in any order, and stop or go on at any moment.

A cell is a usual run folder, made by the usual command; a finished one is left alone, and a half-done one goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError, MaskConnectError
from maskconnect.experiments.grid import Cell, Grid
from maskconnect.training.files import LOCK, lock, write_atomically
from maskconnect.training.folder import RunFolder
from maskconnect.training.show import Silent, duration
from maskconnect.training.stop import Stopped, StopRequests

LIST, LOGS = "sweep.json", "logs"
PARENT = "MASKCONNECT_PARENT"
"""The process that a run should not outlive: killed or hung up, it takes its runs along (see cli/main.py)."""

GRACE = 20.0
"""Seconds that runs have to save when something has gone wrong here."""

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    folder: Path
    summary: dict[str, Any] | None  # None: there is no result
    why: str = ""  # there is none


@dataclass(frozen=True)
class Overall:
    """How far the whole grid is, as `Silent.progress` takes it."""

    step: float
    steps: float
    ended: int
    running: int
    left: float | None  # seconds

    def text(self, *, short: bool = False) -> str:
        """In words."""
        left = "" if self.left is None else f", {duration(self.left)} left"
        return f"{self.ended} of {self.steps:.0f} runs have ended, {self.running} at work{left}"


@dataclass
class Job:
    """A cell that is being run."""

    cell: Cell
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    logged: int  # how many bytes of the log are of earlier calls
    done_before: float  # which share of it an earlier call had done


def sweep(grid: Grid, out: Path, *, jobs: int, options: Sequence[str], show: Silent) -> list[Outcome]:
    """Run what is missing of a grid; raises `Stopped` after SIGTERM or Ctrl-C, when all runs have saved."""
    recipe = str(Path(grid.recipe).resolve()) if ".toml" in grid.recipe else grid.recipe
    ours = {"recipe": recipe, "settings": list(grid.settings), "over": [field for field, _ in grid.over]}
    return run_cells(grid.cells(), out, ours, jobs=jobs, options=options, show=show)


def run_cells(
    cells: Sequence[Cell], out: Path, ours: dict[str, Any], *, jobs: int, options: Sequence[str], show: Silent
) -> list[Outcome]:
    """Run what is missing of some cells, in a folder that is known by `ours`."""
    with ExitStack() as stack:
        claim(ours, out, stack)
        todo = [cell for cell in cells if not _finished(cell, out)]
        ended = len(cells) - len(todo)
        before = f"; {ended} {'has' if ended == 1 else 'have'} ended before" if ended else ""
        show.line(f"{len(cells)} run{'s' * (len(cells) > 1)} in {out}, {jobs} at a time{before}")
        requests = stack.enter_context(StopRequests())
        stack.enter_context(show)
        failed = Runner(out, todo, len(cells), jobs, list(options), show, requests).run()
    return [_outcome(cell, out, failed) for cell in cells]


def claim(ours: dict[str, Any], out: Path, stack: ExitStack) -> None:
    """Make the folder one for just this; an error if it is another's, or if another process works in it."""
    begun = (out / LIST).exists() or (out / LOGS).is_dir()  # a disk that was full may have left the second only
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not begun)):
        raise ConfigError(f"{out} holds something else than a sweep; choose another place by --out.")
    try:
        (out / LOGS).mkdir(parents=True, exist_ok=True)
        held = stack.enter_context((out / LOCK).open("w"))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another place by --out.") from None
    if not lock(held):
        raise ConfigError(f"another sweep works in {out}; wait for it, or choose another --out.")
    if (out / LIST).exists():
        theirs = _list(out)
        key = next((key for key, value in ours.items() if theirs.get(key) != value), None)
        if key is not None:
            raise ConfigError(
                f"{out} holds another sweep: {key} is {theirs.get(key)} there and {ours[key]} here. More seeds or "
                "values may be added; for anything else choose another --out."
            )
    write_atomically(out / LIST, json.dumps(ours, indent=1) + "\n")


def _list(out: Path) -> dict[str, Any]:
    try:
        found = json.loads((out / LIST).read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{out / LIST} is damaged; remove it, and the sweep goes on with the runs that are there.")
    return found


def _finished(cell: Cell, out: Path) -> bool:
    """Whether a cell has ended; an error if its folder holds a run of another recipe."""
    folder = RunFolder(out / cell.name)
    if (folder.path / "metrics.jsonl").exists():
        folder.check_recipe(cell.recipe)
    return folder.finished


def _outcome(cell: Cell, out: Path, failed: dict[str, str]) -> Outcome:
    folder = RunFolder(out / cell.name)
    if cell.name in failed:
        return Outcome(cell, folder.path, None, failed[cell.name])
    try:
        summary = folder.summary()
        numbers = summary["test"]["top1"], summary["parameters"]["pruned"], summary["seconds"]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError
    except (MaskConnectError, KeyError, TypeError):
        return Outcome(cell, folder.path, None, f"{folder.path / 'summary.json'} is damaged")
    return Outcome(cell, folder.path, summary)


class Runner:
    """The processes of a sweep."""

    def __init__(
        self,
        out: Path,
        todo: list[Cell],
        total: int,
        jobs: int,
        options: list[str],
        show: Silent,
        requests: StopRequests,
    ) -> None:
        self.out, self.todo, self.total, self.jobs = out, list(todo), total, jobs
        self.options, self.show, self.requests = options, show, requests
        self.running: list[Job] = []
        self.failed: dict[str, str] = {}
        self.ended = total - len(todo)  # with a result or without
        self.started, self.work = time.monotonic(), 0.0  # how many cells' worth of work this call has seen end

    def run(self) -> dict[str, str]:
        """Run all; returns why those failed that did."""
        try:
            while self.todo or self.running:
                while self.todo and len(self.running) < self.jobs and self.requests.asked is None:
                    self.start(self.todo.pop(0))
                self.look()
                if self.requests.asked is not None:
                    self.stop(self.requests.asked)
                time.sleep(POLL)
        finally:
            self.end_all()  # if a second signal came, or something went wrong here
        return self.failed

    def start(self, cell: Cell) -> None:
        """Start a cell, in a session of its own: Ctrl-C is for us to pass on."""
        folder, log = self.out / cell.name, self.out / LOGS / f"{cell.name}.log"
        done, logged = share_done(folder, cell.recipe.epochs), log.stat().st_size if log.exists() else 0
        words = [sys.executable, "-m", "maskconnect", "train", cell.source, "--seed", str(cell.recipe.seed)]
        words += [word for setting in cell.settings for word in ("--set", setting)]
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*words, *cell.extra, f"--out={folder}", *self.options],
                env=os.environ | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(Job(cell, folder, log, process, logged, done))

    def look(self) -> None:
        """See who has ended, and how far the others are."""
        for job in [job for job in self.running if job.process.poll() is not None]:
            self.running.remove(job)
            self.ended += 1
            self.note(job)
        shares = [share_done(job.folder, job.cell.recipe.epochs) for job in self.running]
        work = self.work + sum(now - job.done_before for now, job in zip(shares, self.running, strict=True))
        done = self.ended + sum(shares)
        seconds = time.monotonic() - self.started
        left = (self.total - done) * seconds / work if work > 0.02 else None
        self.show.progress(Overall(done, self.total, self.ended, len(self.running), left))

    def note(self, job: Job) -> None:
        """Say what became of a cell."""
        code, folder = job.process.returncode, RunFolder(job.folder)
        if code == 0 and folder.finished:
            self.work += 1 - job.done_before
            test = folder.summary()["test"]["top1"]
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name}: test accuracy {test:.2f} %")
        elif self.requests.asked is None:
            self.failed[job.cell.name] = why = reason(job, code)
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name} FAILED: {why}")
            alike = len(self.failed) > 1 and len(set(self.failed.values())) == 1
            if code == 2 and alike and self.work == 0 and (self.todo or self.running):
                raise ConfigError(f"{why} So it was for {len(self.failed)} runs and no other; the rest is not started.")

    def stop(self, number: int) -> None:
        """Ask all to save and end, wait for them, and stop."""
        count = len(self.running)
        self.show.line(f"stopping {count} run{'s' * (count != 1)}; a second time stops at once")
        asked = {job.cell.name: self.ask(job, number) for job in self.running}
        while self.running:
            self.running = [job for job in self.running if job.process.poll() is None]
            for job in self.running:
                if _lines(job.folder) > asked[job.cell.name] + 3:  # it goes on: a library has swallowed the signal
                    asked[job.cell.name] = self.ask(job, number)
            time.sleep(POLL)
        raise Stopped(number)

    def ask(self, job: Job, number: int) -> int:
        """Send a signal to a run; returns how many lines of metrics it had then."""
        lines = _lines(job.folder)
        with suppress(ProcessLookupError):
            os.kill(job.process.pid, number)
        return lines

    def end_all(self) -> None:
        """End what still runs: by asking, and after some seconds without."""
        for job in self.running:
            job.process.terminate()
        deadline = time.monotonic() + GRACE
        for job in self.running:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            job.process.kill()
        self.running = []


def _lines(folder: Path) -> int:
    """How many lines of metrics a run has written."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def share_done(folder: Path, epochs: int) -> float:
    """Which share of its epochs a run has done, as far as its metrics tell."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        try:
            found = json.loads(line)
            begun = 0.0 if found["kind"] == "epoch" else 0.5  # an epoch that has begun counts half
            return min(1.0, (int(found["epoch"]) - begun) / epochs)
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0


def reason(job: Job, code: int) -> str:
    """Why a process failed: the last thing it said, or what ended it."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; see {job.log}"
    said = job.log.read_bytes()[job.logged :].decode("utf-8", "replace")
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {code}; see {job.log}"
