"""The join of residual blocks: what they add is summed, what they pass on is averaged (D1).

A block returns a pair, its residual F_k(x_k) and its shortcut S_k(x_k). Target j reads

    x_j = ReLU( sum_k m_jk F_k(x_k) + (1/K_j) sum_k m_jk S_k(x_k) )

which is Eq. 1 followed by a ReLU, with a source that depends on the fan-in of its reader:

    x_j = ReLU( sum_k m_jk y_k(K_j) ),    y_k(K) = F_k(x_k) + S_k(x_k) / K

Readers of one fan-in share y_k. With K = 1 it is the usual residual block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from maskconnect.errors import ConfigError

if TYPE_CHECKING:
    from maskconnect.core.wiring import Sources


class Pair(NamedTuple):
    """What a residual block returns."""

    residual: Tensor
    shortcut: Tensor


class Residual(nn.Module):
    """A residual block as `aggregation="residual"` needs it: it returns what it adds and what it passes on.

        mc.MaskedStack([mc.Residual(body) for body in bodies], fan_in=4, aggregation="residual")

    Args:
        body: F, what the block adds to its input.
        shortcut: S, what the block passes on: by default its input. Needed where `body` changes the shape.
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        for name, part in (("body", body), ("shortcut", shortcut)):
            if not isinstance(part, nn.Module) and not (part is None and name == "shortcut"):
                raise ConfigError(f"{name} is a {type(part).__name__}; it must be an nn.Module.")
        self.residual, self.shortcut = body, nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """F(x) and S(x); further arguments are for F."""
        return Pair(self.residual(x, *args, **kwargs), self.shortcut(x))


def is_pair(y: Any) -> bool:
    """Whether a block returned a residual and a shortcut of one shape."""
    return (
        isinstance(y, tuple)
        and len(y) == 2
        and all(isinstance(part, Tensor) for part in y)
        and (y[0].is_nested or y[0].shape == y[1].shape)
    )


def described(y: Any) -> str:
    """What a block returned in the place of a pair, in words."""
    if isinstance(y, tuple) and len(y) == 2 and all(isinstance(part, Tensor) for part in y):
        return f"a residual of shape {tuple(y[0].shape)} and a shortcut of shape {tuple(y[1].shape)}"
    return f"a {type(y).__name__}"


def combined(residual: Tensor, shortcut: Tensor, fan_in: int) -> Tensor:
    """y_k(K): the residual and a K-th of the shortcut."""
    return residual + shortcut if fan_in == 1 else torch.add(residual, shortcut, alpha=1 / fan_in)


def mean_fan_in_of_readers(candidates: Sources, fan_in: Sequence[int]) -> list[float]:
    """For each module the mean K of the targets that may read it; 1 where none may."""
    first = len(candidates) - len(fan_in)
    readers: list[list[int]] = [[] for _ in candidates]
    for target, count in enumerate(fan_in, start=first):
        for k in candidates[target]:
            readers[k].append(count)
    return [sum(row) / len(row) if row else 1.0 for row in readers]
