"""A SLURM job: `maskconnect train`, with its output where a local sweep writes it."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maskconnect.experiments.engine import log_of, words_of
from maskconnect.experiments.grid import Cell
from maskconnect.training.files import write_atomically

PLACE = "slurm"
"""The folder for files of the jobs, next to the run folders."""


@dataclass(frozen=True)
class Train:
    """A job: `maskconnect train` in the process of the job, so that each signal reaches the run exactly once."""

    words: tuple[str, ...]
    folder: Path
    log: Path
    code: Path  # the file for its exit code

    @classmethod
    def of(cls, cell: Cell, out: Path, options: Sequence[str]) -> Train:
        """Return the job of a cell."""
        return cls((*words_of(cell, out), *options), out / cell.name, log_of(cell, out), code_file(cell, out))

    def __call__(self) -> None:
        """Train, and write the exit code; raise an error if it is not 0, so that SLURM marks the job as failed."""
        self.code.unlink(missing_ok=True)  # left from before SLURM queued it again
        before = self._checkpoints()
        code = self._train()
        if (
            code == 128 + signal.SIGUSR2 and self._checkpoints() != before
        ):  # without progress, it would be queued forever
            _, trouble = run_command(["scontrol", "requeue", _own_number(os.environ)])
            if not trouble:
                raise SystemExit(code)
        write_atomically(self.code, f"{code}\n")
        if code:
            raise RuntimeError(f"exit code {code}; see {self.log}")

    def _train(self) -> int:
        """Run the command in this process, with its output in its log."""
        words = ["maskconnect", *self.words]
        if "--threads" not in words and (cpus := _cpus(os.environ)):
            processes = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 1
            words += ["--threads", str(max(1, cpus // processes))]
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


def code_file(cell: Cell, out: Path) -> Path:
    """Return the file for the exit code of a job."""
    return out / PLACE / f"{cell.name}.code"


def _own_number(variables: Mapping[str, str]) -> str:
    """Return the job number of this process."""
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def _cpus(variables: Mapping[str, str]) -> int:
    """Return how many CPUs this process may use; 0 if SLURM does not say."""
    return int(variables.get("SLURM_CPUS_PER_TASK") or variables.get("SLURM_CPUS_ON_NODE") or 0)


def run_command(words: Sequence[str]) -> tuple[str, str]:
    """Run a command of SLURM, out of reach of Ctrl-C; return its output, and an error message or ""."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, start_new_session=True)
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} took longer than a minute"
    return done.stdout, (first_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""


def first_line(said: str) -> str:
    """Return the first line of a message, without the name of the command."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^\w+: ((error|fatal): )?", "", lines[0]).rstrip(".") if lines else ""
