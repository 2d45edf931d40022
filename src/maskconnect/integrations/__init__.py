"""Callbacks and helpers for the libraries that people train with; each file needs its own library only."""

import importlib
from typing import Any

FILES = ("fsdp", "huggingface", "lightning")


def __getattr__(name: str) -> Any:
    """A file of this package, imported when it is first asked for."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
