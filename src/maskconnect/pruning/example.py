"""Run an example through stacks to find the shapes of outputs and further arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from maskconnect.core.outputs import Shapes
from maskconnect.core.residual import is_pair
from maskconnect.core.stack import MaskedStack
from maskconnect.pruning.rewired import built_stacks_of


class Pass(NamedTuple):
    """Observations from one run of a stack on an example."""

    input: Size | None
    shapes: Shapes
    arguments: tuple[str | int, ...]
    half: set[bool]
    tensors: set[bool]


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[MaskedStack, list[Pass]]]:
    """Note the output shapes of all modules in each pass of each stack, including unused modules."""
    seen: dict[MaskedStack, list[Pass]] = {stack: [] for _, stack in built_stacks_of(model)}

    def begin(stack: MaskedStack, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack._shapes.clear()  # so that unused modules also run and show their shapes
        first = args[0] if args else None
        shape = first.shape if isinstance(first, Tensor) and not first.is_nested else None
        seen[stack].append(Pass(shape, [], (*range(1, len(args)), *kwargs), set(), set()))

    def enter(stack: MaskedStack, module: nn.Module, _: Any) -> None:
        depth[stack] += 1  # a module of a stack may call another one of the same stack

    def note(stack: MaskedStack, module: nn.Module, _: Any, y: Any) -> None:
        depth[stack] -= 1
        _, shapes, _, half, tensors = seen[stack][-1] if seen[stack] else Pass(None, [], (), set(), set())
        in_turn = seen[stack] and not depth[stack] and len(shapes) < len(stack.flat())
        if in_turn:  # otherwise the model calls it outside the stack
            y = y[0] if stack.aggregation == "residual" and is_pair(y) else y  # the shortcut has the same shape
            shapes.append(y.shape if isinstance(y, Tensor) and not y.is_nested else None)
            half.add(isinstance(y, Tensor) and y.dtype == torch.float16)
            tensors.add(isinstance(y, Tensor))

    depth = dict.fromkeys(seen, 0)
    handles = [stack.register_forward_pre_hook(begin, with_kwargs=True) for stack in seen]
    for stack in seen:
        for module in dict.fromkeys(stack.flat()):
            handles.append(module.register_forward_pre_hook(partial(enter, stack)))
            handles.append(module.register_forward_hook(partial(note, stack)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
