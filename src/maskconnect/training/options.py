"""Options of a run that are not part of its recipe: device, precision, speed and safety."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maskconnect.errors import ConfigError, integer, shown, unknown_name
from maskconnect.training.precision import PRECISIONS, WHOLE, Precision, probe

MOST_THREADS = 1024
NORMS = ("recipe", "local", "sync")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `maskconnect train` that are not part of a recipe."""

    data: Path | None = None  # the folder that holds the data set
    device: str = "auto"
    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False  # compile the network, once its wiring is fixed
    lean: bool = False  # recompute wide tensors in the backward pass instead of keeping them
    threads: int | None = None  # CPU threads; None: the default of torch
    deterministic: bool = False
    workers: int = 0  # processes that decode image files
    checkpoint_every: float = 300.0  # seconds; each phase also ends with a checkpoint
    log_every: int = 50  # steps between lines of metrics
    norm: str = "recipe"  # the images that batch norms see with several ranks
    skip_nonfinite: bool = False  # skip batches whose loss is not finite, instead of stopping

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if self.lean and (self.precision not in WHOLE or self.compile):
            raise ConfigError(
                "--lean works neither with --precision bf16 or fp16 nor with --compile; remove one of them."
            )
        for name, least in (("workers", 0), ("log_every", 1)):
            if integer(name, getattr(self, name)) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least} or more.")
        if self.threads is not None and not 1 <= integer("threads", self.threads) <= MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; it must be from 1 to {MOST_THREADS}.")
        if not 0 <= self.checkpoint_every <= math.inf:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; it must be 0 seconds or more.")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device, precision and memory format of a network."""

    device: torch.device
    precision: Precision
    channels_last: bool
    lean: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self.precision.autocast()

    def ready(self, x: Tensor) -> Tensor:
        """Return images in the memory format and the precision of the weights."""
        x = x.double() if self.precision.name == "fp64" else x
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x


def prepare(options: Options, *, tune_allocator: bool = True) -> Machine:
    """Configure torch according to the options, and tune the allocator of the C library for training."""
    device = device_of(options.device)
    if tune_allocator:
        keep_memory()
    os.environ.update(probe(options.precision, device.type))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    precision = Precision(name=options.precision, device_type=device.type)
    return Machine(device=device, precision=precision, channels_last=options.channels_last, lean=options.lean)


def keep_memory() -> bool:
    """Make the C library keep large freed blocks of memory; return whether that worked (Linux with glibc).

    Call it once, before the first step, if you train on a CPU. Otherwise every step requests the same blocks from the
    system again, which takes about a tenth of a learning step. `maskconnect train` calls it.
    """
    trim_threshold, most_mapped, never = -1, -4, 2**31 - 1
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(tune(trim_threshold, never)) and bool(tune(most_mapped, 0))


def device_of(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU if there is one."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # this rank's GPU
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists all that torch knows
        raise ConfigError(f"device is {shown(name)}; use cpu, cuda or cuda:1.") from None
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"device is {shown(name)}, which cannot be used here: {reason}. Try --device cpu.") from None
    return device
