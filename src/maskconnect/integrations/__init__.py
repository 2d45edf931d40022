"""Callbacks and helpers for other training libraries; each file needs only its own library."""

import importlib
from typing import Any

FILES = ("fsdp", "huggingface", "lightning")


def __getattr__(name: str) -> Any:
    """Import a file of this package on first use."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
