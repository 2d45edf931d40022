"""Run a grid: each cell by itself, several at a time, in any order, and stop or go on at any moment.

A cell is a usual run folder, made by the usual command; a finished one is left alone, and a half-done one goes on.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError
from maskconnect.experiments.engine import LOGS, Engine, Job
from maskconnect.experiments.grid import Cell, Grid
from maskconnect.experiments.kept import Kept, Result
from maskconnect.reading import read_json
from maskconnect.training.files import LOCK, is_unfinished, lock, remove_unfinished, write_atomically
from maskconnect.training.folder import RunFolder
from maskconnect.training.progress import Silent, duration
from maskconnect.training.stop import Stopped, StopRequests

LIST = "sweep.json"
"""The file that says which sweep a folder is of."""

GRACE = 20.0
"""Seconds that runs have to save when something has gone wrong here."""


NOT_RUN = "it has not been run"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    folder: Path
    summary: dict[str, Any] | None  # None: there is no result
    why: str = ""  # there is none
    result: Result | None = None  # as it is kept; the folder may be gone then


@dataclass(frozen=True)
class Overall:
    """How far the whole grid is, as `Silent.progress` takes it."""

    step: float
    steps: float
    ended: int
    running: int
    waiting: int
    left: float | None  # seconds

    def text(self, *, short: bool = False) -> str:
        """In words."""
        left = "" if self.left is None else f", {duration(self.left)} left"
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        return f"{self.ended} of {self.steps:.0f} runs have ended, {self.running} at work{waiting}{left}"


def sweep(grid: Grid, out: Path, *, engine: Engine, show: Silent, kept: Kept | None = None) -> list[Outcome]:
    """Run what is missing of a grid; raises `Stopped` after SIGTERM or Ctrl-C, when all runs have saved."""
    recipe = str(Path(grid.recipe).resolve()) if ".toml" in grid.recipe else grid.recipe
    ours = {"recipe": recipe, "settings": list(grid.settings), "over": [field for field, _ in grid.over]}
    return run_cells(grid.cells(), out, ours, engine=engine, show=show, kept=kept)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    ours: dict[str, Any],
    *,
    engine: Engine,
    show: Silent,
    kept: Kept | None = None,
) -> list[Outcome]:
    """Run what is missing of some cells, in a folder that is known by `ours`; what is `kept` is not missing."""
    with ExitStack() as stack:
        claim(ours, out, stack)
        engine.check(out)
        todo = [cell for cell in cells if not (_is_kept(cell, kept) or _finished(cell, out, kept))]
        ended = len(cells) - len(todo)
        before = f"; {ended} {'has' if ended == 1 else 'have'} ended before" if ended else ""
        show.line(f"{len(cells)} run{'s' * (len(cells) > 1)} in {out}, {engine.about}{before}")
        requests = stack.enter_context(StopRequests())
        stack.enter_context(show)
        failed = Runner(engine, out, todo, len(cells), show, requests, kept).run()
    return [_outcome(cell, out, failed, kept) for cell in cells]


def found_cells(cells: Sequence[Cell], out: Path, kept: Kept | None = None) -> list[Outcome]:
    """What is known of some cells, from results that are kept and runs that have ended; nothing is run."""
    there = {cell.name for cell in cells if _is_kept(cell, kept) or RunFolder(out / cell.name).finished}
    missing = {cell.name: NOT_RUN for cell in cells if cell.name not in there}
    return [_outcome(cell, out, missing, kept) for cell in cells]


def claim(ours: dict[str, Any], out: Path, stack: ExitStack) -> None:
    """Make the folder one for just this; an error if it is another's, or if another process works in it."""
    if out.exists() and not _is_ours(out):
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
    remove_unfinished(out)
    write_atomically(out / LIST, json.dumps(ours, indent=1) + "\n")


def _is_ours(out: Path) -> bool:
    """Whether a folder is empty, or holds a sweep, or what a full disk or a kill has left of the start of one."""
    if not out.is_dir():
        return False
    return (out / LIST).exists() or {child.name for child in out.iterdir() if not is_unfinished(child)} <= {LOGS, LOCK}


def _list(out: Path) -> dict[str, Any]:
    try:
        found = read_json(out / LIST)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{out / LIST} is damaged; remove it, and the sweep goes on with the runs that are there.")
    return found


def _is_kept(cell: Cell, kept: Kept | None) -> bool:
    """Whether a cell has ended in an earlier sitting, whose folders may be gone."""
    return kept is not None and kept.get(cell.recipe) is not None


def _finished(cell: Cell, out: Path, kept: Kept | None) -> bool:
    """Whether a cell has ended, which is then kept; an error if its folder holds a run of another recipe."""
    folder = RunFolder(out / cell.name)
    if (folder.path / "metrics.jsonl").exists() and (other := _other_recipe(folder, cell)):
        raise ConfigError(other)
    if folder.finished:
        _keep(folder, kept)
    return folder.finished


def _keep(folder: RunFolder, kept: Kept | None) -> None:
    """Keep what came of a run, unless it is damaged, as its outcome will say."""
    if kept is not None:
        with suppress(CheckpointError):
            kept.keep(folder)


def _other_recipe(folder: RunFolder, cell: Cell) -> str:
    """In what the recipe of a run is not that of its cell, as happens if a file is changed in the middle of a sweep."""
    try:
        folder.check_recipe(cell.recipe)
    except ConfigError as error:
        return str(error).replace(", or add --fresh for a new folder", "")
    return ""


def _outcome(cell: Cell, out: Path, failed: dict[str, str], kept: Kept | None) -> Outcome:
    folder, known = RunFolder(out / cell.name), None if kept is None else kept.get(cell.recipe)
    if cell.name in failed:
        return Outcome(cell, folder.path, None, failed[cell.name])
    try:
        summary = folder.summary() if known is None else known.summary
    except MaskConnectError:
        return Outcome(cell, folder.path, None, f"{folder.path / 'summary.json'} is damaged")
    return Outcome(cell, folder.path, summary, result=known)


class Runner:
    """Gives the cells of a sweep to an engine, and sees them end."""

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
        self.ended = total - len(todo)  # with a result or without
        self.hopeless: set[tuple[str, ...]] = set()  # of which values a cell has failed
        self.work = 0.0  # how many cells' worth of work this call has seen end
        self.looked, self.busy = time.monotonic(), 0.0  # the last look, and for how long something was at work

    def run(self) -> dict[str, str]:
        """Run all; returns why those failed that did."""
        try:
            while self.todo or self.running:
                if self.requests.asked is None:
                    self.start(self.engine.at_once - len(self.running))
                self.look()
                if self.requests.asked is not None:
                    self.stop(self.requests.asked)
                time.sleep(self.engine.poll)
        finally:
            self.end_all()  # if a second signal came, or something went wrong here
        return self.failed

    def start(self, room: int) -> None:
        """Start the next cells, if there is room."""
        if self.todo and room > 0:
            now, self.todo = self.todo[:room], self.todo[room:]
            self.running += self.engine.start(now, self.out)

    def look(self) -> None:
        """See who has ended, and how far the others are."""
        for job in list(self.running):
            if (end := job.end()) is not None:
                self.running.remove(job)
                self.ended += 1
                self.note(job, end)
        self.say_news()
        waiting = sum(job.waiting for job in self.running)
        now = time.monotonic()
        self.busy += (now - self.looked) * (len(self.running) > waiting)
        self.looked = now
        shares = [job.share_done() for job in self.running]
        work = self.work + sum(share - job.done_before for share, job in zip(shares, self.running, strict=True))
        done = self.ended + sum(shares)
        left = (self.total - done) * self.busy / work if work > 0.02 else None
        self.show.progress(Overall(done, self.total, self.ended, len(self.running) - waiting, waiting, left))

    def say_news(self) -> None:
        """Say what the engine has to say."""
        while self.engine.news:
            self.show.line(self.engine.news.pop(0))

    def note(self, job: Job, end: int | str) -> None:
        """Say what became of a cell."""
        folder = RunFolder(job.folder)
        other = _other_recipe(folder, job.cell) if end == 0 and folder.finished else ""
        if end == 0 and folder.finished and not other:
            self.work += 1 - job.done_before
            test = folder.summary()["test"]["top1"]
            _keep(folder, self.kept)
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name}: test accuracy {test:.2f} %")
        elif self.requests.asked is None:
            self.failed[job.cell.name] = why = other or job.reason(end)
            self.show.line(f"[{self.ended}/{self.total}] {job.cell.name} FAILED: {why}")
            self.hopeless.add(job.cell.values)
            if end == 2 and self.engine.one_machine and self.is_in_vain(why):
                raise ConfigError(
                    f"{why.rstrip('.')}. So it was for {len(self.failed)} runs, and the rest differs in seeds."
                )

    def is_in_vain(self, why: str) -> bool:
        """Whether all that is left would fail too: it differs from what has failed, all alike, in nothing but seeds."""
        alike = len(self.failed) > 1 and set(self.failed.values()) == {why} and self.ended == len(self.failed)
        left = [*self.todo, *(job.cell for job in self.running if job.share_done() == job.done_before)]
        at_work = len(self.todo) + len(self.running) - len(left)
        return alike and not at_work and bool(left) and {cell.values for cell in left} <= self.hopeless

    def stop(self, number: int) -> None:
        """Ask all to save and end, wait for them, and stop."""
        count = len(self.running)
        self.show.line(f"stopping {count} run{'s' * (count != 1)}; a second time stops at once")
        asked = {job.cell.name: _lines(job.folder) for job in self.running}
        heard = self.engine.ask(self.running, number)
        while self.running:
            heard = heard or self.engine.ask(self.running, number)
            self.running = [job for job in self.running if job.end() is None]
            deaf = [job for job in self.running if _lines(job.folder) > asked[job.cell.name] + 3]
            if deaf:  # they go on: a library has swallowed the signal
                asked |= {job.cell.name: _lines(job.folder) for job in deaf}
                self.engine.ask(deaf, number)
            self.say_news()
            time.sleep(self.engine.poll)
        raise Stopped(number)

    def end_all(self) -> None:
        """End what still runs: by asking, and after some seconds without."""
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
    """How many lines of metrics a run has written."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
