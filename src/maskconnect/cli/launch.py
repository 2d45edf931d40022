"""`maskconnect train --nproc N`: torchrun, from within.

A worker that ends because it was told to, or because of a mistake that a new start would not mend, tells us its exit
code by a file, and no worker does anything after that. Anything else that ends one makes torchrun start all of them
anew, from the last checkpoint.
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
"""The file in which the workers leave their exit code."""

stopped_together = False
"""Whether this worker, and so all, was asked to stop and has saved."""

FINAL = (2, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)))
"""Exit codes after which a new start would be of no use, or is not wanted."""

RESTARTS = 3


def launch(count: int, words: list[str]) -> int:
    """Run `maskconnect` with some words in so many processes, and return their exit code."""
    check(count)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what happens, the workers and we say
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
                said = f"rank {rank} has ended with exit code {failure.exitcode}, after {RESTARTS} restarts"
                print(said, file=sys.stderr)
        finally:
            del os.environ[EXIT], os.environ[PARENT]
        return int(file.read_text()) if file.exists() else code


def check(count: int) -> None:
    """An error if so many processes cannot be meant."""
    if count < 1:
        raise ConfigError(f"--nproc is {count}; it must be 1 or more.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--nproc starts torchrun, and torchrun has started this; leave --nproc out.")


def is_over() -> bool:
    """Whether a worker has told us an exit code: torchrun starts all anew if one has not ended well, but in vain."""
    place = os.environ.get(EXIT)
    return place is not None and Path(place).exists()


def end(code: int) -> NoReturn:
    """End this process; a worker tells us its exit code, and leaves at once, because threads of torch may hang on."""
    place = os.environ.get(EXIT)
    if place is not None and code in FINAL:
        if not Path(place).exists():
            partial = Path(f"{place}-{os.getpid()}")
            partial.write_text(str(code))
            partial.replace(place)
        if stopped_together or code == 2:  # else torchrun should end those that wait for us
            code = 0
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def words_of(args: argparse.Namespace, out: Path, options: list[str]) -> list[str]:
    """What `maskconnect train` was given, for each of the processes."""
    words = ["train", args.recipe, f"--out={out}", *(f"--set={setting}" for setting in args.settings)]
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    words += [] if args.init_from is None else [f"--init-from={args.init_from}"]
    words += [] if args.wiring is None else [f"--wiring={args.wiring}"]
    return words + options
