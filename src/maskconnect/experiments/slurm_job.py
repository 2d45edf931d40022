"""What a job of SLURM does: `maskconnect train`, with its output where a sweep of one machine has it."""

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
"""The folder, beside those of the runs, for what is needed to talk with the jobs."""


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
        return cls((*words_of(cell, out), *options), out / cell.name, log_of(cell, out), code_file(cell, out))

    def __call__(self) -> None:
        """Train, and leave the exit code; an error if it is not 0, for SLURM to see."""
        self.code.unlink(missing_ok=True)  # of before SLURM queued it again
        before = self._checkpoints()
        code = self._train()
        if code == 128 + signal.SIGUSR2 and self._checkpoints() != before:  # else it would go on like this for ever
            _, trouble = run_command(["scontrol", "requeue", _own_number(os.environ)])
            if not trouble:
                raise SystemExit(code)
        write_atomically(self.code, f"{code}\n")
        if code:
            raise RuntimeError(f"exit code {code}; see {self.log}")

    def _train(self) -> int:
        """The command in this process, its output in its log."""
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
    """Where a job leaves its exit code."""
    return out / PLACE / f"{cell.name}.code"


def _own_number(variables: Mapping[str, str]) -> str:
    """The number of the job that this process is."""
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def _cpus(variables: Mapping[str, str]) -> int:
    """How many CPUs this process may use; 0 where SLURM does not tell."""
    return int(variables.get("SLURM_CPUS_PER_TASK") or variables.get("SLURM_CPUS_ON_NODE") or 0)


def run_command(words: Sequence[str]) -> tuple[str, str]:
    """What a command of SLURM prints, and what went wrong, if anything; Ctrl-C is not for it."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, start_new_session=True)
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} takes longer than a minute"
    return done.stdout, (first_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""


def first_line(said: str) -> str:
    """The first line of what SLURM says, without the name of the command."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^\w+: ((error|fatal): )?", "", lines[0]).rstrip(".") if lines else ""
