"""Which masks a forward pass drew, for when activation checkpointing runs that pass again.

`torch.utils.checkpoint` repeats a forward pass during the backward pass and restores torch's global random
state for it, but not a private generator, and it does not say which pass it repeats. So:

- With `use_reentrant=True` a pass and its repetition share a context object, which is found on the call stack;
  the draw is left there.
- With `use_reentrant=False` the repetition is known to be that of the one pass in flight: a draw is in flight
  from its forward pass until the backward pass reaches the output of the stack. With several in flight there
  is no telling, and that is an error.
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
    from maskconnect.core.masks import BinaryMasks

_NO_BACKWARD = -1
_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


def backward_pass() -> int | None:
    """The number of the backward pass that is running in this thread, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


class InFlight:
    """The draws of one stack that may yet be asked for again; their graphs keep them alive."""

    def __init__(self) -> None:
        self._waiting: WeakSet[BinaryMasks] = WeakSet()  # the backward pass has not reached their output
        self._reached: WeakSet[BinaryMasks] = WeakSet()  # it has; with retain_graph it may come again
        self._latest: tuple[int, BinaryMasks] | None = None  # the latest that was reached, and in which backward pass

    def __reduce__(self) -> tuple[type[InFlight], tuple[()]]:
        return InFlight, ()  # a copy of a stack has no pass in flight

    def remember(self, masks: BinaryMasks, outputs: Iterable[Tensor]) -> None:
        """Note that a forward pass with these masks has ended in `outputs`."""
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
        """The masks of the forward pass that is being run again."""
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
            "in flight, so which masks it drew then is not known. Call backward() after each forward pass, "
            "or checkpoint the modules inside the stack instead."
        )

    def _draws_in(self, context: Any) -> set[BinaryMasks]:
        """The draws of this stack that were left in the context of a reentrant checkpoint."""
        if not hasattr(context, "maskconnect_draws"):
            context.maskconnect_draws = {}
        draws: set[BinaryMasks] = context.maskconnect_draws.setdefault(self, set())
        return draws


def _contexts() -> list[Any]:
    """The contexts of the reentrant checkpoints that this call is made under; the compiler cannot look."""
    if torch.compiler.is_compiling():
        return []
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back  # type: ignore[assignment]
    return found
