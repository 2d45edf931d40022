"""Remember which masks a forward pass drew, because activation checkpointing may repeat that pass.

`torch.utils.checkpoint` repeats a forward pass during the backward pass. It restores torch's global random state, but
not other generators, and it does not say which pass it repeats. So:

- With `use_reentrant=True`, a pass and its repetition share a context object on the call stack. The draw is stored
  there.
- With `use_reentrant=False`, the repeated pass must be the only one in flight. A draw is in flight from its forward
  pass until the backward pass reaches the output of the stack. Several draws in flight are an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from maskconnect.errors import ConnectivityError

if TYPE_CHECKING:
    from maskconnect.core.binary import BinaryMasks

_NO_BACKWARD = -1
_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


def backward_pass() -> int | None:
    """Return the number of the backward pass that runs in this thread, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


class InFlight:
    """The draws of one stack that may be needed again; their graphs keep them alive."""

    def __init__(self) -> None:
        self._waiting: WeakSet[BinaryMasks] = WeakSet()  # a backward pass has not reached their output yet
        self._reached: WeakSet[BinaryMasks] = WeakSet()  # it has, and with retain_graph it may do so again
        self._latest: tuple[int, BinaryMasks] | None = None  # the last one that was reached, and by which backward pass

    def __reduce__(self) -> tuple[type[InFlight], tuple[()]]:
        return InFlight, ()  # a copy of a stack has no pass in flight

    def remember(self, masks: BinaryMasks, outputs: Iterable[Tensor]) -> None:
        """Note that a forward pass with these masks returned `outputs`."""
        for context in _contexts():
            self._draws_in(context).add(masks)
        for output in outputs:
            if output.grad_fn is not None:
                self._waiting.add(masks)
                output.register_hook(partial(self._reach, masks))  # type: ignore[no-untyped-call]

    def _reach(self, masks: BinaryMasks, grad: Tensor) -> None:
        self._waiting.discard(masks)
        self._reached.add(masks)
        number = backward_pass()
        self._latest = None if number is None else (number, masks)

    def recall(self) -> BinaryMasks:
        """Return the masks of the forward pass that is being repeated."""
        possible: set[BinaryMasks] = set().union(*map(self._draws_in, _contexts()))
        if not possible:
            possible = set(self._waiting)
            if self._latest is not None and self._latest[0] == backward_pass():
                possible.add(self._latest[1])
        possible = possible or set(self._reached)
        if len(possible) == 1:
            return possible.pop()
        raise ConnectivityError(
            f"a stack that learns was run again during a backward pass, with {len(possible)} of its forward passes "
            "in flight, so it is unknown which masks it drew. Call backward() after each forward pass, "
            "or checkpoint the modules inside the stack instead."
        )

    def _draws_in(self, context: Any) -> set[BinaryMasks]:
        """Return the draws of this stack that are stored in the context of a reentrant checkpoint."""
        if not hasattr(context, "maskconnect_draws"):
            context.maskconnect_draws = {}
        draws: set[BinaryMasks] = context.maskconnect_draws.setdefault(self, set())
        return draws


def _contexts() -> list[Any]:
    """Return the contexts of the reentrant checkpoints around this call; none while a compiler traces."""
    if torch.compiler.is_compiling():
        return []
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back  # type: ignore[assignment]
    return found
