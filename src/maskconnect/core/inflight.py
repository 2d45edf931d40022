"""Which masks a forward pass drew, for when activation checkpointing runs that pass again.

`torch.utils.checkpoint` repeats a forward pass during the backward pass and restores torch's global random
state for it, but not a private generator, and it does not say which pass it repeats. A draw is *in flight*
from its forward pass until the backward pass reaches the output of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from maskconnect.core.masks import BinaryMasks
from maskconnect.errors import ConnectivityError

_NO_BACKWARD = -1


def backward_pass() -> int | None:
    """The number of the backward pass that is running in this thread, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


class InFlight:
    """The draws of one stack that may yet be asked for again."""

    def __init__(self) -> None:
        self._waiting: WeakSet[BinaryMasks] = WeakSet()  # the graph of a pass keeps its draw alive, nothing else
        self._begun: tuple[int, BinaryMasks] | None = None  # the last backward pass to reach an output
        self._without_grad: list[BinaryMasks] = []  # use_reentrant=True draws without a graph

    def __reduce__(self) -> tuple[type[InFlight], tuple[()]]:
        return InFlight, ()  # a copy of a stack has no pass in flight

    def remember(self, masks: BinaryMasks, outputs: Iterable[Tensor]) -> None:
        """Note that a forward pass with these masks has ended in `outputs`."""
        if not torch.is_grad_enabled():
            self._without_grad = [*self._without_grad[-1:], masks]
            return
        self._without_grad = []
        for output in outputs:
            if output.grad_fn is not None:
                self._waiting.add(masks)
                output.register_hook(partial(self._begin, masks))  # type: ignore[no-untyped-call]

    def _begin(self, masks: BinaryMasks, grad: Tensor) -> None:
        self._waiting.discard(masks)
        number = backward_pass()
        if number is not None:
            self._begun = number, masks

    def recall(self) -> BinaryMasks:
        """The masks of the forward pass that is being run again."""
        possible = {*self._waiting, *self._without_grad}
        if self._begun is not None and self._begun[0] == backward_pass():
            possible.add(self._begun[1])
        if len(possible) == 1:
            self._without_grad = []
            return possible.pop()
        raise ConnectivityError(
            f"a stack that learns was run again during a backward pass, with {len(possible)} of its forward passes "
            "in flight, so which masks it drew then is not known. Call backward() after each forward pass, "
            "or checkpoint the modules inside the stack instead."
        )
