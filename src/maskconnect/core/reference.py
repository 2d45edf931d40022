"""The readable way to do it all, beside which every faster one is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from maskconnect.errors import ConnectivityError

_asked = [0]  # how many blocks are open, in any thread: a backward pass may run in another


@contextmanager
def reference() -> Iterator[None]:
    """Inside, forward passes take the readable path: every module by itself, gradients by autograd alone.

    Slower, and equal up to rounding; for comparisons, and for gradients of gradients. With activation checkpointing the
    backward pass belongs inside too, because it repeats forward passes.
    """
    _asked[0] += 1
    try:
        yield
    finally:
        _asked[0] -= 1


def is_reference() -> bool:
    """Whether the readable path is asked for; a compiler cannot look."""
    return not torch.compiler.is_compiling() and _asked[0] > 0


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of a function refuse to be differentiated itself, however that is tried.

    (The decorator of torch refuses only where all gradients are asked for; else it leaves terms out without a word.)
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
    """The first `count` tensors, which depend on all the others, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ConnectivityError(
            "gradients of gradients are not known to the fast path; run the forward pass inside `with mc.reference():`."
        )
