"""Run the cells of a sweep on a cluster, as one array job of SLURM, through submitit.

Jobs outlive the command that queued them: if it is killed or loses its terminal, the same command finds its jobs in the
queue and waits for them. Ctrl-C ends them after they have saved. A job whose time is nearly up saves and queues itself
again, so a run may take longer than the time limit of a job.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError, need
from maskconnect.experiments.engine import Engine, Job
from maskconnect.experiments.grid import Cell
from maskconnect.experiments.slurm_job import PLACE, Train, code_file, first_line, run_command
from maskconnect.reading import read_json
from maskconnect.training.files import write_atomically

RESERVED = (
    *("array", "chdir", "clusters", "error", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("signal", "test-only", "wait", "wrap"),
)
"""Options of sbatch that maskconnect sets itself."""

TIME_TO_SAVE = 120
"""Seconds before its time limit at which a job is asked to save."""

ASK_EVERY = 5.0
"""Seconds between two calls of squeue."""

LATE = 10.0
"""Seconds until a file written on another machine is visible here."""

OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
}
"""The states of jobs that have ended; SLURM forgets jobs some time after their end."""

FORGOTTEN = "unknown to SLURM"
ENDING = 120.0
"""Seconds to wait for jobs that are about to end; a cluster may clean up after a job."""


class SlurmJob(Job):
    """A cell that is, or was, in the SLURM queue."""

    def __init__(self, cell: Cell, out: Path, number: str, queue: Queue) -> None:
        super().__init__(cell, out)
        self.number, self._queue, self._code = number, queue, code_file(cell, out)
        self._since = time.monotonic()
        self._ran, self._over = False, 0.0  # whether it was seen running, and when it was first seen ended

    @property
    def waiting(self) -> bool:
        """Whether it is queued and not yet running."""
        return self._queue.states().get(self.number) == "PENDING"

    def end(self) -> int | str | None:
        """Return the exit code that the job has written, or the state in which it ended without one.

        A job that SLURM has queued again may have left an old code, so its state decides, except for code 0.
        """
        code = int(self._code.read_text()) if self._code.exists() else None
        if code == 0:
            return code
        state = self._queue.states().get(self.number, FORGOTTEN)
        if self._queue.answered < self._since:  # SLURM has not been asked since this job was queued
            return None
        if state not in OVER and state != FORGOTTEN:
            self._ran, self._over = self._ran or state != "PENDING", 0.0
            return None
        if code is not None:
            return code
        self._over = self._over or time.monotonic()
        late = LATE if self._ran or state != "CANCELLED" else 0.0  # a job that never ran has left nothing
        return f"SLURM: job {self.number} is {state}" if time.monotonic() >= self._over + late else None


class Queue:
    """The states of our jobs; squeue is called every few seconds."""

    def __init__(self, messages: list[str]) -> None:
        self.messages, self.trouble = messages, ""  # why SLURM does not answer
        self.answered = float("-inf")  # when the last successful call was made
        self._states: dict[str, str] = {}
        self._asked = float("-inf")

    def states(self, *, now: bool = False) -> dict[str, str]:
        """Return the state of each job that SLURM remembers; the last known states if it does not answer."""
        if now or time.monotonic() > self._asked + ASK_EVERY:
            words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i %T"]
            self._asked = time.monotonic()
            said, trouble = run_command(words)
            if not trouble:
                self._states = dict(line.split(maxsplit=1) for line in said.splitlines())
                self.answered = self._asked
            elif not self.trouble:
                self.messages.append(f"SLURM does not answer ({trouble}); its jobs may continue; retrying")
            self.trouble = trouble
        return self._states


class Slurm(Engine):
    """Run jobs on a cluster."""

    poll = 1.0
    at_once = sys.maxsize  # SLURM limits how many run
    one_machine = False

    def __init__(self, jobs: int | None, options: Sequence[str], settings: Mapping[str, str | bool]) -> None:
        """Run `jobs` at a time, or as many as the cluster allows; `settings` are options of sbatch."""
        self._submitit = need("submitit", extra="slurm")
        if missing := [name for name in ("sbatch", "squeue", "scancel", "srun") if shutil.which(name) is None]:
            raise ConfigError(f"{missing[0]} is not installed; run --engine slurm on a login node of a SLURM cluster.")
        if taken := sorted(set(RESERVED) & set(settings)):
            raise ConfigError(f"--slurm {taken[0]}: maskconnect sets this option itself; leave it out.")
        self._jobs, self._options, self._settings = jobs, list(options), dict(settings)
        self.messages = []
        self._queue, self._last_trouble = Queue(self.messages), ""
        self.about = "through SLURM" if jobs is None else f"through SLURM, {jobs} at a time"

    def check(self, out: Path) -> None:
        """Fail if SLURM cannot use the folder, or does not answer."""
        if "%" in str(out.resolve()):
            raise ConfigError(f"{out} has a % in its name, which SLURM would replace; choose another --out.")
        self._queue.states(now=True)
        if self._queue.trouble:
            raise ConfigError(f"SLURM does not answer: {self._queue.trouble}. Check that squeue works, and retry.")

    def start(self, cells: Sequence[Cell], out: Path) -> Sequence[Job]:
        """Queue the cells that are not yet in the queue, all as one array."""
        place, out = out / PLACE, out.resolve()
        place.mkdir(exist_ok=True)
        numbers = _read_numbers(place)
        queued = self._queued(cells, out, numbers)
        if queued:
            self.messages.append(f"{len(queued)} of them {'is' if len(queued) == 1 else 'are'} already in the queue")
        if new := [cell for cell in cells if cell not in queued]:
            for cell in new:
                code_file(cell, out).unlink(missing_ok=True)
            numbers |= dict(zip((cell.name for cell in new), self._submit(new, out), strict=True))
            write_atomically(place / "jobs.json", json.dumps(numbers, indent=1) + "\n")
            self.messages.append(f"queued as SLURM job {numbers[new[0].name].partition('_')[0]}")
            self._queue.states(now=True)
        return [SlurmJob(cell, out, numbers[cell.name], self._queue) for cell in cells]

    def _queued(self, cells: Sequence[Cell], out: Path, numbers: Mapping[str, str]) -> list[Cell]:
        """Return the cells that already have a job; wait for those that are about to end."""
        deadline = time.monotonic() + ENDING
        while True:
            states = self._queue.states(now=True)
            found = {cell.name: states.get(numbers.get(cell.name, ""), "COMPLETED") for cell in cells}
            ending = [
                cell
                for cell in cells
                if found[cell.name] == "COMPLETING" or (found[cell.name] == "RUNNING" and code_file(cell, out).exists())
            ]
            if not ending or time.monotonic() > deadline:
                return [cell for cell in cells if found[cell.name] not in OVER and cell not in ending]
            time.sleep(1)

    def _submit(self, cells: Sequence[Cell], out: Path) -> list[str]:
        """Submit new jobs, and return their numbers."""
        executor = self._submitit.SlurmExecutor(folder=out / PLACE)
        cpus = self._settings.get("cpus-per-task")
        executor.update_parameters(
            job_name=f"maskconnect-{out.name}",
            time=None,  # the limit of the partition, unless --slurm time sets one
            wckey=None,
            signal_delay_s=TIME_TO_SAVE,
            array_parallelism=self._jobs or len(cells),
            srun_args=[f"--cpus-per-task={cpus}"] if cpus else None,  # srun does not take it from sbatch
            additional_parameters={name.replace("-", "_"): value for name, value in self._settings.items()},
        )
        errors = self._submitit.core.utils.FailedJobError, self._submitit.core.utils.FailedSubmissionError
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # handle Ctrl-C when sbatch has ended
        try:
            with redirect_stderr(io.StringIO()):  # it prints the errors that it raises
                jobs = executor.submit_array([Train.of(cell, out, self._options) for cell in cells])
        except errors as error:
            for left in (out / PLACE).glob("[0-9a-f]*.pkl"):
                left.unlink() if "_" not in left.name else None
            said = first_line(str(error)) or "sbatch gives no reason"
            parts = " Run it in parts, with --seeds or --over." if "array" in said else ""
            raise ConfigError(f"SLURM rejected {len(cells)} jobs: {said}.{parts}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return [str(job.job_id) for job in jobs]

    def ask(self, jobs: Sequence[Job], number: int) -> bool:
        """Remove queued jobs, and send SIGTERM to running ones: other signals have special meanings in SLURM."""
        self._queue.states(now=True)
        waiting = self._cancel([job for job in jobs if job.waiting])
        working = self._cancel([job for job in jobs if not job.waiting], "--signal=TERM")
        self._queue.states(now=True)
        return waiting and working

    def kill(self, jobs: Sequence[Job]) -> None:
        """Cancel the jobs."""
        self._cancel(jobs)

    def _cancel(self, jobs: Sequence[Job], *options: str) -> bool:
        numbers = [job.number for job in jobs if isinstance(job, SlurmJob)]
        _, trouble = run_command(["scancel", "--quiet", *options, *numbers]) if numbers else ("", "")
        if trouble and trouble != self._last_trouble:
            self.messages.append(f"scancel failed: {trouble}; retrying")
        self._last_trouble = trouble
        return not trouble


def settings_of(texts: Sequence[str]) -> dict[str, str | bool]:
    """Parse options of sbatch such as `cpus-per-task=4` and `exclusive`."""
    found: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        if not name or (equals and not value.strip()):
            raise ConfigError(
                f"--slurm is {text!r}; it must be an sbatch option, such as partition=gpu or time=4:00:00."
            )
        if name in found:
            raise ConfigError(f"--slurm {name} is given twice; leave one out.")
        found[name] = value.strip() if equals else True
    return found


def jobs_in_queue(out: Path) -> int:
    """Return how many jobs of a sweep are in the SLURM queue; 0 if SLURM is not installed."""
    if not (out / PLACE).exists() or shutil.which("squeue") is None:
        return 0
    states = Queue([]).states(now=True)
    return sum(states.get(number, "COMPLETED") not in OVER for number in _read_numbers(out / PLACE).values())


def _read_numbers(place: Path) -> dict[str, str]:
    """Return the last job number of each cell."""
    try:
        found: Any = read_json(place / "jobs.json")
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{place / 'jobs.json'} is damaged; cancel the jobs of this sweep, if any, and remove the file."
        )
    return {str(name): str(number) for name, number in found.items()}
