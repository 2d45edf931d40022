"""How a run is carried out: on what, how fast, how carefully. What it computes, the recipe says."""

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
    """The choices of `maskconnect train` that are not part of a recipe."""

    data: Path | None = None  # the folder that the data set is in
    device: str = "auto"
    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False  # the network, once its wiring is fixed
    lean: bool = False  # make wide tensors again backward, rather than keep them
    threads: int | None = None  # of the CPU; None: as many as torch takes
    deterministic: bool = False
    workers: int = 0  # processes that decode image files
    checkpoint_every: float = 300.0  # seconds; one is written at the end of each phase too
    log_every: int = 50  # steps between lines of metrics
    norm: str = "recipe"  # over what batch norms go on several ranks
    skip_nonfinite: bool = False  # leave a batch out whose loss is not finite, instead of stopping

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if self.lean and (self.precision not in WHOLE or self.compile):
            raise ConfigError("--lean goes with neither --precision bf16 or fp16 nor --compile; leave one out.")
        for name, least in (("workers", 0), ("log_every", 1)):
            if integer(name, getattr(self, name)) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least} or more.")
        if self.threads is not None and not 1 <= integer("threads", self.threads) <= MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; it must be 1 or more, and {MOST_THREADS} at most.")
        if not 0 <= self.checkpoint_every <= math.inf:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; it must be 0 seconds or more.")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """On what the network runs."""

    device: torch.device
    precision: Precision
    channels_last: bool
    lean: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return self.precision.autocast()

    def ready(self, x: Tensor) -> Tensor:
        """Images in the memory format and in the numbers that the weights have."""
        x = x.double() if self.precision.name == "fp64" else x
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x


def prepare(options: Options, *, tune_allocator: bool = True) -> Machine:
    """Set torch up as the options say, and the C library's allocator for training."""
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
    """Let the C library keep large blocks that were freed, where it can; whether it could.

    Otherwise every step gets the same blocks from the system anew, page by page: a tenth of a learning step.
    """
    trim_threshold, most_mapped, never = -1, -4, 2**31 - 1
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(tune(trim_threshold, never)) and bool(tune(most_mapped, 0))


def device_of(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # of this rank
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"device is {shown(name)}, which cannot be used here: {reason}. Try --device cpu.") from None
    return device
