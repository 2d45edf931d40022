"""Run the cells of a sweep on a cluster: one array job of SLURM, through submitit.

A job outlives the command that queued it: where that is killed or hung up, the same command again finds its jobs in the
queue and waits for them. Ctrl-C ends them, after they have saved. A job whose time is nearly up saves and queues itself
again, so a run may be longer than a job.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError, need
from maskconnect.experiments.engine import Engine, Job, log_of, words_of
from maskconnect.experiments.grid import Cell
from maskconnect.training.files import write_atomically

PLACE = "slurm"
"""The folder, beside those of the runs, for what is needed to talk with the jobs."""

OURS = ("array", "error", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal")
"""Options of sbatch that we choose."""

TIME_TO_SAVE = 120
"""Seconds before the end of a job's time at which it is told to save."""

ASK_EVERY = 5.0
"""Seconds between two questions to SLURM."""

LATE = 10.0
"""Seconds that a file written on another machine may need to be seen here."""

OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
"""The states of jobs that run no more; those that SLURM has forgotten have none."""


class SlurmJob(Job):
    """A cell that is in the queue of SLURM, or has been."""

    def __init__(self, cell: Cell, out: Path, number: str, queue: Queue) -> None:
        super().__init__(cell, out)
        self.number, self._queue, self._code = number, queue, _code_file(cell, out)
        self._ran, self._over = False, 0.0  # whether it was seen at work, and since when no more

    @property
    def waiting(self) -> bool:
        """Whether it waits for its turn."""
        return self._queue.states().get(self.number) == "PENDING"

    def end(self) -> int | str | None:
        """The exit code that the job has left, or the state in which it ended without."""
        if self._code.exists():
            return int(self._code.read_text())
        state = self._queue.states().get(self.number, "unknown to it")
        if state not in OVER | {"unknown to it"}:
            self._ran, self._over = self._ran or state != "PENDING", 0.0
            return None
        self._over = self._over or time.monotonic()
        late = LATE if self._ran or state != "CANCELLED" else 0.0  # a job that never ran has left nothing
        return f"SLURM: job {self.number} is {state}" if time.monotonic() >= self._over + late else None


class Queue:
    """The states of our jobs, asked for now and then."""

    def __init__(self, news: list[str]) -> None:
        self.news, self.trouble = news, ""  # why SLURM does not answer
        self._states: dict[str, str] = {}
        self._asked = float("-inf")

    def states(self, *, now: bool = False) -> dict[str, str]:
        """The state of each job that SLURM remembers; the last ones known if it does not answer."""
        if now or time.monotonic() > self._asked + ASK_EVERY:
            words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i %T"]
            said, trouble = _run(words)
            if not trouble:
                self._states = dict(line.split(maxsplit=1) for line in said.splitlines())
            elif not self.trouble and self._states:
                self.news.append(f"SLURM does not answer ({trouble}); its jobs may go on, and it is asked again")
            self.trouble, self._asked = trouble, time.monotonic()
        return self._states


class Slurm(Engine):
    """Jobs of a cluster."""

    poll = 1.0
    at_once = sys.maxsize  # SLURM sees to it that no more run than may

    def __init__(self, jobs: int | None, options: Sequence[str], settings: Mapping[str, str | bool]) -> None:
        """`jobs` at a time, or as many as the cluster takes; `settings` are options of sbatch."""
        self._submitit = need("submitit", extra="slurm")
        if missing := [name for name in ("sbatch", "squeue", "scancel", "srun") if shutil.which(name) is None]:
            raise ConfigError(
                f"there is no {missing[0]} here; --engine slurm is for a machine from which SLURM is used."
            )
        if taken := sorted(set(OURS) & set(settings)):
            raise ConfigError(f"--slurm {taken[0]}: that is chosen by maskconnect; leave it out.")
        self._jobs, self._options, self._settings = jobs, list(options), dict(settings)
        self.news = []
        self._queue = Queue(self.news)
        self.about = "through SLURM" if jobs is None else f"through SLURM, {jobs} at a time"

    def start(self, cells: Sequence[Cell], out: Path) -> Sequence[Job]:
        """Queue the cells that are not in the queue already, all as one array."""
        states = self._queue.states(now=True)
        if self._queue.trouble:
            raise ConfigError(f"SLURM does not answer: {self._queue.trouble}.")
        place, out = out / PLACE, out.resolve()
        place.mkdir(exist_ok=True)
        numbers = _read_numbers(place)
        queued = [c for c in cells if states.get(numbers.get(c.name, ""), "COMPLETED") not in OVER]
        if queued:
            self.news.append(f"{len(queued)} of them {'is' if len(queued) == 1 else 'are'} in the queue already")
        if new := [cell for cell in cells if cell not in queued]:
            for cell in new:
                _code_file(cell, out).unlink(missing_ok=True)
            numbers |= dict(zip((cell.name for cell in new), self._submit(new, out), strict=True))
            write_atomically(place / "jobs.json", json.dumps(numbers, indent=1) + "\n")
            self.news.append(f"queued as job {numbers[new[0].name].partition('_')[0]} of SLURM")
            self._queue.states(now=True)
        return [SlurmJob(cell, out, numbers[cell.name], self._queue) for cell in cells]

    def _submit(self, cells: Sequence[Cell], out: Path) -> list[str]:
        """The numbers of new jobs."""
        executor = self._submitit.SlurmExecutor(folder=out / PLACE)
        cpus = self._settings.get("cpus-per-task")
        executor.update_parameters(
            job_name=f"maskconnect-{out.name}",
            time=None,  # that of the partition, unless --slurm time says otherwise
            wckey=None,
            signal_delay_s=TIME_TO_SAVE,
            array_parallelism=self._jobs or len(cells),
            srun_args=[f"--cpus-per-task={cpus}"] if cpus else None,  # srun does not look at what sbatch was told
            additional_parameters={name.replace("-", "_"): value for name, value in self._settings.items()},
        )
        try:
            with redirect_stderr(io.StringIO()):  # where it would print what it raises
                jobs = executor.submit_array([Train.of(cell, out, self._options) for cell in cells])
        except (self._submitit.core.utils.FailedJobError, self._submitit.core.utils.FailedSubmissionError) as error:
            raise ConfigError(f"SLURM takes no such job: {_first_line(str(error))}.") from None
        return [str(job.job_id) for job in jobs]

    def ask(self, jobs: Sequence[Job], number: int) -> None:
        """Take those that wait out of the queue, and send SIGTERM to the others: some signals mean more to SLURM."""
        self._queue.states(now=True)
        self._cancel([job for job in jobs if job.waiting])
        self._cancel([job for job in jobs if not job.waiting], "--signal=TERM")
        self._queue.states(now=True)

    def kill(self, jobs: Sequence[Job]) -> None:
        """End them."""
        self._cancel(jobs)

    def _cancel(self, jobs: Sequence[Job], *options: str) -> None:
        if numbers := [job.number for job in jobs if isinstance(job, SlurmJob)]:
            _, trouble = _run(["scancel", "--quiet", *options, *numbers])
            if trouble:
                self.news.append(f"scancel: {trouble}")


@dataclass(frozen=True)
class Train:
    """What a job does: `maskconnect train` in its own process, so that each signal reaches the run, and once."""

    words: tuple[str, ...]
    folder: Path
    log: Path
    code: Path  # the file for its exit code

    @classmethod
    def of(cls, cell: Cell, out: Path, options: Sequence[str]) -> Train:
        """The job of a cell."""
        return cls((*words_of(cell, out), *options), out / cell.name, log_of(cell, out), _code_file(cell, out))

    def __call__(self) -> None:
        """Train, and leave the exit code; an error if it is not 0, for SLURM to see."""
        before = self._checkpoints()
        code = self._train()
        if code == 128 + signal.SIGUSR2 and self._checkpoints() != before:  # else it would go on like this for ever
            _, trouble = _run(["scontrol", "requeue", _own_number(os.environ)])
            if not trouble:
                raise SystemExit(code)
        write_atomically(self.code, f"{code}\n")
        if code:
            raise RuntimeError(f"exit code {code}; see {self.log}")

    def _train(self) -> int:
        """The command in this process, its output in its log."""
        words = ["maskconnect", *self.words]
        if "--threads" not in words and (cpus := _cpus(os.environ)):
            words += ["--threads", cpus]
        kept = [(number, os.dup(number)) for number in (1, 2)]
        with self.log.open("ab") as file:
            for number, _ in kept:
                os.dup2(file.fileno(), number)
        try:
            sys.argv = words
            runpy.run_module("maskconnect", run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
        return 1

    def _checkpoints(self) -> list[str]:
        place = self.folder / "checkpoints"
        return sorted(found.name for found in place.iterdir()) if place.exists() else []


def settings_of(texts: Sequence[str]) -> dict[str, str | bool]:
    """`cpus-per-task=4` and `exclusive` as options of sbatch."""
    found: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        if not name or (equals and not value.strip()):
            raise ConfigError(f"--slurm {text}: needed is an option of sbatch, such as partition=gpu or time=4:00:00.")
        if name in found:
            raise ConfigError(f"--slurm {name} is given twice.")
        found[name] = value.strip() if equals else True
    return found


def _code_file(cell: Cell, out: Path) -> Path:
    return out / PLACE / f"{cell.name}.code"


def _read_numbers(place: Path) -> dict[str, str]:
    """Which job each cell was given to last."""
    try:
        found: Any = json.loads((place / "jobs.json").read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{place / 'jobs.json'} is damaged; cancel the jobs of this sweep, if any, and remove it.")
    return {str(name): str(number) for name, number in found.items()}


def _own_number(variables: Mapping[str, str]) -> str:
    """The number of the job that this process is."""
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def _cpus(variables: Mapping[str, str]) -> str | None:
    """How many CPUs this process may use, where SLURM tells."""
    return variables.get("SLURM_CPUS_PER_TASK") or variables.get("SLURM_CPUS_ON_NODE")


def _run(words: Sequence[str]) -> tuple[str, str]:
    """What a command of SLURM prints, and what went wrong, if anything; Ctrl-C is not for it."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, start_new_session=True)
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} takes longer than a minute"
    return done.stdout, (_first_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""


def _first_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else ""
