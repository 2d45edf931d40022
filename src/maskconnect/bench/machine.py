"""The machine on which something was timed."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import maskconnect


def machine() -> dict[str, Any]:
    """Return the processor, the number of cores and threads, and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "maskconnect": maskconnect.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
