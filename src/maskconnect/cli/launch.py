"""`maskconnect train --nproc N`: run torchrun from Python.

A worker that was asked to stop, or that failed with an error that a restart would not fix, writes its exit code to a
file, and no worker continues after that. If a worker ends for any other reason, torchrun restarts all of them from the
last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from maskconnect.errors import ConfigError
from maskconnect.training.stop import PARENT

EXIT = "MASKCONNECT_EXIT"
"""The environment variable that names the file for the exit code of the workers."""

stopped_together = False
"""Whether this worker, and so all of them, was asked to stop and has saved."""

FINAL = (2, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)))
"""Exit codes after which a restart would not help, or is not wanted."""

RESTARTS = 3


def launch(count: int, words: list[str]) -> int:
    """Run `maskconnect` with these arguments in `count` processes, and return their exit code."""
    check(count)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we and the workers print what happens
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGUSR2"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with a shared store most restarts fail
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="maskconnect",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "exit"
        os.environ |= {EXIT: str(file), PARENT: str(os.getpid())}
        code = 0
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "maskconnect", *words)
        except SignalException as stopped:
            code = 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            code, (rank, failure) = 1, failed.get_first_failure()
            if not file.exists():
                said = f"rank {rank} ended with exit code {failure.exitcode}, after {RESTARTS} restarts"
                print(said, file=sys.stderr)
        finally:
            del os.environ[EXIT], os.environ[PARENT]
        return int(file.read_text()) if file.exists() else code


def check(count: int) -> None:
    """Fail if the number of processes is invalid."""
    if count < 1:
        raise ConfigError(f"--nproc is {count}; it must be 1 or more.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--nproc starts torchrun, but torchrun started this process; leave --nproc out.")


def has_ended() -> bool:
    """Return whether a worker has written its exit code; processes that torchrun starts after that must stop."""
    place = os.environ.get(EXIT)
    return place is not None and Path(place).exists()


def end(code: int) -> NoReturn:
    """End this process. A worker writes its exit code, and leaves at once, because threads of torch may hang."""
    place = os.environ.get(EXIT)
    if place is not None and code in FINAL:
        if not Path(place).exists():
            partial = Path(f"{place}-{os.getpid()}")
            partial.write_text(str(code))
            partial.replace(place)
        if stopped_together or code == 2:  # otherwise torchrun should end the workers that wait for this one
            code = 0
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def words_of(args: argparse.Namespace, out: Path, options: list[str]) -> list[str]:
    """Return the arguments of `maskconnect train` for each process."""
    words = ["train", args.recipe, f"--out={out}", *(f"--set={setting}" for setting in args.settings)]
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    words += [] if args.init_from is None else [f"--init-from={args.init_from}"]
    words += [] if args.wiring is None else [f"--wiring={args.wiring}"]
    return words + options
