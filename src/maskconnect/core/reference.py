"""The readable way to do it all, beside which every faster one is proven."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_on = ContextVar("maskconnect_reference", default=False)


@contextmanager
def reference() -> Iterator[None]:
    """Inside, forward passes take the readable path: every module by itself, gradients by autograd alone.

    Slower, and equal up to rounding; for comparisons, and for gradients of gradients.
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_reference() -> bool:
    """Whether the readable path is asked for; a compiler cannot look."""
    return not torch.compiler.is_compiling() and _on.get()
