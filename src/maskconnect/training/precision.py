"""The number formats to train in, and a check that this machine supports them.

Some virtual CPUs advertise instructions (AMX) that crash oneDNN and the whole process. So bf16 and fp16 are first tried
in a child process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from maskconnect.errors import ConfigError, unknown_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PRECISIONS = tuple(DTYPES)
WHOLE = ("fp32", "fp64")
"""The formats without autocast."""

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
TIMEOUT = 120.0  # seconds

# These sizes use the kernels of real networks; oneDNN has others for few channels.
SCRIPT = """
import contextlib, sys
with contextlib.suppress(ImportError, OSError, ValueError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no core file
import torch
from torch import nn

dtype, device = getattr(torch, sys.argv[1]), torch.device(sys.argv[2])
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, groups=16), nn.ReLU(),
    nn.Conv2d(64, 128, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100),
).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
for _ in range(2):
    images, labels = torch.randn(32, 3, 32, 32, device=device), torch.randint(100, (32,), device=device)
    with torch.autocast(device.type, dtype=dtype):
        loss = nn.functional.cross_entropy(net(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
if not all(bool(value.isfinite().all()) for value in (loss, *net.parameters())):
    raise ArithmeticError("a loss or a weight is not finite")
"""


@dataclass(frozen=True)
class Precision:
    """The number format of forward and backward passes; weights are fp32, or everything is fp64 (to compare)."""

    name: str
    device_type: str

    def __post_init__(self) -> None:
        _known(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """The format of weights and images."""
        return torch.float64 if self.name == "fp64" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the forward pass uses this format."""
        if self.name in WHOLE:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=DTYPES[self.name])

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the gradient scaler that fp16 needs; None for other formats."""
        return torch.amp.GradScaler(self.device_type) if self.name == "fp16" else None


def probe(name: str, device: str) -> dict[str, str]:
    """Return the environment variables that this precision needs; an error if it does not work here.

    oneDNN reads them once, at its first use, so set them before any network runs in this process.
    """
    _known(name)
    if name in WHOLE:
        return {}
    if device.startswith("cuda"):
        if name == "bf16" and not torch.cuda.is_bf16_supported():
            raise ConfigError(f"the device {device} does not support bf16; use --precision fp16 or --precision fp32.")
        return {}
    variables: dict[str, str] = {}
    died, failure = _try(name, device, variables)
    if died:
        variables = dict(WITHOUT_AMX)
        died, failure = _try(name, device, variables)
    if failure:
        raise ConfigError(f"{name} does not work on this machine: a small network {failure}; use --precision fp32.")
    return variables


def _known(name: str) -> None:
    if name not in PRECISIONS:
        raise unknown_name("the precision", name, PRECISIONS)


def _try(name: str, device: str, variables: dict[str, str]) -> tuple[bool, str]:
    """Train a small network in a child process; return whether a signal ended it, and the failure, if any."""
    command = [sys.executable, "-P", "-c", SCRIPT, str(DTYPES[name]).removeprefix("torch."), device]
    try:
        child = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return False, f"did not finish within {TIMEOUT:g} s"
    except OSError as error:
        return False, f"could not be tried ({error.strerror})"
    if child.returncode == 0:
        return False, ""
    if child.returncode < 0:
        return True, f"was killed by {_signal(-child.returncode)}"
    lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
    return False, f"failed ({lines[-1].strip()})"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
