"""The software and hardware that a result may depend on, besides its recipe."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from maskconnect.training.options import Options


def environment(options: Options) -> dict[str, Any]:
    """Return versions, commit, machine and options of this process."""
    packages = ("maskconnect", "torch", "numpy", "safetensors", "pillow", "scikit-learn")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in packages if (found := _version(name))},
        "commit": _commit(),
        **machine_of(options),
        "options": asdict(options),
        "arguments": sys.argv[1:],
    }


def machine_of(options: Options) -> dict[str, Any]:
    """Return everything besides the recipe and the data that the exact bits of a result depend on."""
    return {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        **{name: getattr(options, name) for name in ("device", "precision", "channels_last", "compile", "lean")},
        "skip_nonfinite": options.skip_nonfinite,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "norm": options.norm,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two machines, in words."""
    return [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the git commit of the code, if it is in a checkout, with a + if files have changed since."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(here)], capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    if tracked.returncode:  # installed inside the repository of another project
        return None
    return found.stdout.strip() + ("+" if changed.returncode else "")
