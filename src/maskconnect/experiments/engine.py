"""Engines that run the cells of a sweep: processes on this machine here; `slurm.py` has jobs on a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from maskconnect.errors import ConfigError
from maskconnect.experiments.grid import Cell
from maskconnect.training.stop import PARENT

LOGS = "logs"
"""The folder for the output of runs, next to the run folders."""


class Job(ABC):
    """A cell that an engine has started."""

    def __init__(self, cell: Cell, out: Path) -> None:
        self.cell, self.folder, self.log = cell, out / cell.name, log_of(cell, out)
        self.logged = self.log.stat().st_size if self.log.exists() else 0  # bytes of earlier calls
        self.done_before = self.share_done()  # by earlier calls

    @abstractmethod
    def end(self) -> int | str | None:
        """Return None before the end; then the exit code, or what ended the job if it has none."""

    @property
    def waiting(self) -> bool:
        """Whether it is queued and not yet running."""
        return False

    def share_done(self) -> float:
        """Return the share of its epochs that the run has done, according to its metrics."""
        return share_done(self.folder, self.cell.recipe.epochs)

    def reason(self, end: int | str) -> str:
        """Return why it failed: the last line it printed, or what ended it."""
        if isinstance(end, str):
            return f"ended by {end}; see {self.log}"
        said = self.log.read_bytes()[self.logged :].decode("utf-8", "replace") if self.log.exists() else ""
        return last_line(said).removeprefix("error: ") or f"exit code {end}; see {self.log}"


class Engine(ABC):
    """Starts jobs, and sends them signals."""

    at_once: int  # jobs that may run at the same time
    poll: float  # seconds between two polls
    about: str  # how they are run, in words
    messages: list[str]  # to be printed; whoever prints them empties the list
    one_machine = True  # then what is missing for one run is missing for all

    @abstractmethod
    def check(self, out: Path) -> None:
        """Fail if these runs cannot be started now."""

    @abstractmethod
    def start(self, cells: Sequence[Cell], out: Path) -> Iterable[Job]:
        """Start some cells; a job that it has yielded is the caller's to end."""

    @abstractmethod
    def ask(self, jobs: Sequence[Job], number: int) -> bool:
        """Send a signal that asks jobs to save and end; return whether it has reached them."""

    @abstractmethod
    def kill(self, jobs: Sequence[Job]) -> None:
        """End jobs without asking."""


class Process(Job):
    """A job that is a process on this machine, in its own session, so that Ctrl-C reaches it only through us."""

    def __init__(self, cell: Cell, out: Path, options: Sequence[str]) -> None:
        super().__init__(cell, out)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "maskconnect", *words_of(cell, out), *options],
                env=os.environ | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> int | str | None:
        """Return the exit code, or the name of a signal."""
        code = self.process.poll()
        if code is None or code >= 0:
            return code
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


class Local(Engine):
    """Run jobs as processes on this machine."""

    poll = 0.2

    def __init__(self, at_once: int, options: Sequence[str]) -> None:
        self.at_once, self.options, self.messages = at_once, list(options), []
        self.about = f"{at_once} at a time"

    def check(self, out: Path) -> None:
        """Fail if SLURM jobs are working on these runs."""
        from maskconnect.experiments.slurm import jobs_in_queue

        if count := jobs_in_queue(out):
            what = f"{count} jobs of this sweep are" if count > 1 else "a job of this sweep is"
            raise ConfigError(f"{what} in the SLURM queue; add --engine slurm to resume, or cancel with scancel.")

    def start(self, cells: Sequence[Cell], out: Path) -> Iterator[Job]:
        """Start a process for each cell."""
        for cell in cells:
            yield Process(cell, out, self.options)

    def ask(self, jobs: Sequence[Job], number: int) -> bool:
        """Send the signal."""
        for job in jobs:
            assert isinstance(job, Process)
            with suppress(ProcessLookupError):
                os.kill(job.process.pid, number)
        return True

    def kill(self, jobs: Sequence[Job]) -> None:
        """Kill the processes."""
        for job in jobs:
            assert isinstance(job, Process)
            job.process.kill()
            job.process.wait()


def words_of(cell: Cell, out: Path) -> list[str]:
    """Return the arguments of `maskconnect` that train a cell."""
    words = ["train", cell.source, "--seed", str(cell.recipe.seed)]
    words += [word for setting in cell.settings for word in ("--set", setting)]
    return [*words, *cell.extra, f"--out={out / cell.name}"]


def log_of(cell: Cell, out: Path) -> Path:
    """Return the file for the output of a cell."""
    return out / LOGS / f"{cell.name}.log"


def last_line(said: str) -> str:
    """Return the last line that a process printed; of a traceback, the line that names the error."""
    lines = [line for line in said.splitlines() if line.strip()]
    traceback = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    if traceback:
        return next((line for line in lines[traceback[-1] + 1 :] if not line.startswith(" ")), lines[-1])
    return lines[-1] if lines else ""


def share_done(folder: Path, epochs: int) -> float:
    """Return the share of its epochs that a run has done, according to its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        try:
            found = json.loads(line)
            begun = 0.0 if found["kind"] == "epoch" else 0.5  # an epoch that has started counts half
            return min(1.0, (int(found["epoch"]) - begun) / epochs)
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
