"""The output shapes of modules that nothing reads (section 3.2).

A target aligns its sources to the output shape of the module before it, also if nothing reads that module. A frozen
stack runs such a module once per kind of input, without a graph, and then remembers the shapes of all modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maskconnect.core.outputs import Shapes

KnownShapes = dict[Any, Shapes]
"""The output shapes of all modules, by what the stack was given."""

MOST_SHAPES = 64
"""The number of inputs for which a stack remembers the shapes."""


def keep_shapes(known: KnownShapes, key: Any, shapes: Shapes) -> None:
    """Remember shapes; start over when there are too many."""
    if len(known) >= MOST_SHAPES:
        known.clear()
    known[key] = shapes


def key_of(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the key for arguments of a stack: names, shapes of tensors and all other values; None if there is none."""
    leaves = tree_leaves((x, args, kwargs))
    nested = any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
    if nested or torch.compiler.is_compiling():
        return None
    key = (*kwargs, *(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    return key if all(isinstance(leaf, Hashable) for leaf in key) else None


@contextmanager
def without_trace(module: nn.Module, *, probing: bool) -> Iterator[None]:
    """Run a module that nothing reads without a graph; with `probing`, for its shape only, also in eval mode."""
    training = [part for part in module.modules() if part.training] if probing else []
    devices = [p.device for p in module.parameters() if p.is_cuda][:1]
    fork = torch.random.fork_rng(devices) if probing and not torch.compiler.is_compiling() else nullcontext()
    try:
        for part in training:
            part.training = False  # so that dropout draws nothing and statistics stay
        with torch.no_grad(), fork:
            yield
    finally:
        for part in training:
            part.training = True
