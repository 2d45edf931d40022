"""`mc.reference`: the reference implementation, against which every fast path is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from maskconnect.errors import ConnectivityError

_open_blocks = [0]  # how many `with` blocks are open in all threads: a backward pass may run in another thread


@contextmanager
def reference() -> Iterator[None]:
    """Use the reference implementation inside a `with` block: module by module, with gradients by autograd alone.

    It is slower than the default and equal up to rounding. Use it for comparisons, and for second-order gradients. With
    activation checkpointing, put the backward pass inside the block too, because it repeats forward passes.

    Example:
        ```python
        with mc.reference():
            expected = model(x)
        ```
    """
    _open_blocks[0] += 1
    try:
        yield
    finally:
        _open_blocks[0] -= 1


def is_reference() -> bool:
    """Return whether the reference implementation is requested; never while a compiler traces."""
    return not torch.compiler.is_compiling() and _open_blocks[0] > 0


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a function, so that differentiating it again raises an error.

    torch's `once_differentiable` raises only if all gradients are requested; otherwise it silently drops terms.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        places = [place for place, output in enumerate(outputs) if output is not None]
        depends_on = [tensor for tensor in (*ctx.saved_tensors, *grads) if tensor is not None]
        refusing = _Refusing.apply(len(places), *(outputs[place] for place in places), *depends_on)  # type: ignore[no-untyped-call]
        all_of_them = dict(zip(places, refusing, strict=True))
        return tuple(all_of_them.get(place) for place in range(len(outputs)))

    return once


class _Refusing(torch.autograd.Function):
    """Return the first `count` tensors, which depend on all others and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ConnectivityError(
            "the fast path does not support second-order gradients. Run the forward pass inside `with mc.reference():`."
        )
