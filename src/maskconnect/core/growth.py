"""A warning when activations grow without bound, as a bare sum makes them (D1)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

TOO_MUCH = 1e4


class GrowthWatch:
    """Looks at the 1st, 2nd, 4th, 8th, ... forward pass of a stack in train mode, and warns once."""

    def __init__(self) -> None:
        self._passes, self._warned = 0, False

    def look(self, first: Any, last: Any) -> None:
        """Compare what the second layer read with the output of the stack."""
        if torch.compiler.is_compiling() or self._warned or not (_has_values(first) and _has_values(last)):
            return
        self._passes += 1
        if self._passes & (self._passes - 1):
            return
        start = _scale(first)
        growth = _scale(last) / start if start else 0.0
        if growth > TOO_MUCH:  # NaN is none of ours: the loss will show it
            self._warned = True
            warnings.warn(
                f"activations grow {growth:.1e} times from the first module to the last, more than {TOO_MUCH:.0e}: "
                "training will hardly work. With aggregation='sum', use another.",
                stacklevel=5,
            )


def _has_values(x: Any) -> bool:
    """Whether x can be looked at: it is no stand-in (meta, fake, traced) and no graph of a GPU is being recorded."""
    if (
        type(x) is not Tensor
        or x.is_meta
        or not x.is_floating_point()
        or not x.numel()
        or torch._C._get_tracing_state()
    ):
        return False
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (recording or torch._C._functorch.is_functorch_wrapped_tensor(x))


def _scale(x: Tensor) -> float:
    """The root mean square."""
    return float(x.detach().float().square().mean().sqrt())
