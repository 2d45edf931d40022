"""What runs the cells of a sweep: processes of this machine here; see `slurm.py` for those of a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from maskconnect.errors import ConfigError
from maskconnect.experiments.grid import Cell
from maskconnect.training.stop import PARENT

LOGS = "logs"
"""The folder, beside those of the runs, for what runs print."""


class Job(ABC):
    """A cell that has been given to an engine."""

    def __init__(self, cell: Cell, out: Path) -> None:
        self.cell, self.folder, self.log = cell, out / cell.name, log_of(cell, out)
        self.logged = self.log.stat().st_size if self.log.exists() else 0  # bytes of earlier calls
        self.done_before = self.share_done()  # by earlier calls

    @abstractmethod
    def end(self) -> int | str | None:
        """None before the end; then the exit code, or what ended it where it had none."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for its turn."""
        return False

    def share_done(self) -> float:
        """Which share of its epochs the run has done, as far as its metrics tell."""
        return share_done(self.folder, self.cell.recipe.epochs)

    def reason(self, end: int | str) -> str:
        """Why it failed: the last thing it said, or what ended it."""
        if isinstance(end, str):
            return f"ended by {end}; see {self.log}"
        said = self.log.read_bytes()[self.logged :].decode("utf-8", "replace") if self.log.exists() else ""
        return last_words(said).removeprefix("error: ") or f"exit code {end}; see {self.log}"


class Engine(ABC):
    """Starts jobs, and sends them signals."""

    at_once: int  # jobs that may be under way
    poll: float  # seconds between two looks at them
    about: str  # how they are run, in words
    news: list[str]  # what there is to say; whoever says it empties the list
    one_machine = True  # so that what one run lacks, all lack

    @abstractmethod
    def check(self, out: Path) -> None:
        """An error if these runs cannot be started now."""

    @abstractmethod
    def start(self, cells: Sequence[Cell], out: Path) -> Sequence[Job]:
        """Start some cells."""

    @abstractmethod
    def ask(self, jobs: Sequence[Job], number: int) -> bool:
        """Ask jobs to save and end, by a signal; whether it has reached them."""

    @abstractmethod
    def kill(self, jobs: Sequence[Job]) -> None:
        """End jobs without asking."""


class Process(Job):
    """A job that is a process of this machine, in a session of its own: Ctrl-C is for us to pass on."""

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
        """The exit code, or the name of a signal."""
        code = self.process.poll()
        if code is None or code >= 0:
            return code
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


class Local(Engine):
    """Processes of this machine."""

    poll = 0.2

    def __init__(self, at_once: int, options: Sequence[str]) -> None:
        self.at_once, self.options, self.news = at_once, list(options), []
        self.about = f"{at_once} at a time"

    def check(self, out: Path) -> None:
        """An error if jobs of a cluster work on these runs."""
        from maskconnect.experiments.slurm import jobs_in_queue

        if count := jobs_in_queue(out):
            what = f"{count} jobs of this sweep are" if count > 1 else "a job of this sweep is"
            raise ConfigError(f"{what} in the queue of SLURM; go on with --engine slurm, or end that by scancel.")

    def start(self, cells: Sequence[Cell], out: Path) -> Sequence[Job]:
        """A process for each."""
        return [Process(cell, out, self.options) for cell in cells]

    def ask(self, jobs: Sequence[Job], number: int) -> bool:
        """Send the signal."""
        for job in jobs:
            assert isinstance(job, Process)
            with suppress(ProcessLookupError):
                os.kill(job.process.pid, number)
        return True

    def kill(self, jobs: Sequence[Job]) -> None:
        """Kill."""
        for job in jobs:
            assert isinstance(job, Process)
            job.process.kill()
            job.process.wait()


def words_of(cell: Cell, out: Path) -> list[str]:
    """What follows `maskconnect` in the command that makes a cell."""
    words = ["train", cell.source, "--seed", str(cell.recipe.seed)]
    words += [word for setting in cell.settings for word in ("--set", setting)]
    return [*words, *cell.extra, f"--out={out / cell.name}"]


def log_of(cell: Cell, out: Path) -> Path:
    """Where a cell's output goes."""
    return out / LOGS / f"{cell.name}.log"


def last_words(said: str) -> str:
    """The last line of what a process has printed; of a traceback the line that names the error."""
    lines = [line for line in said.splitlines() if line.strip()]
    traceback = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    if traceback:
        return next((line for line in lines[traceback[-1] + 1 :] if not line.startswith(" ")), lines[-1])
    return lines[-1] if lines else ""


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
