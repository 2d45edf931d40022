"""The join of residual blocks: residuals are summed, shortcuts are averaged (D1).

A block returns a pair, its residual F_k(x_k) and its shortcut S_k(x_k). Target j reads

    x_j = ReLU( sum_k m_jk F_k(x_k) + (1/K_j) sum_k m_jk S_k(x_k) )

which is Eq. 1 followed by a ReLU, with a source that depends on the fan-in of its reader:

    x_j = ReLU( sum_k m_jk y_k(K_j) ),    y_k(K) = F_k(x_k) + S_k(x_k) / K

Readers with the same fan-in share y_k. K = 1 gives the usual residual block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from maskconnect.errors import ConfigError, ConnectivityError

if TYPE_CHECKING:
    from maskconnect.core.wiring import Sources


class Pair(NamedTuple):
    """A residual and a shortcut, as a residual block returns them."""

    residual: Tensor
    shortcut: Tensor


class Residual(nn.Module):
    """A residual block for `aggregation="residual"`: it returns its residual and its shortcut as a pair.

    A ReLU follows the join. Bodies that start with a norm or an activation need no ReLU: pass them to a stack with
    `aggregation="stream"`, without this wrapper.

    Args:
        body: F, the module that computes the residual.
        shortcut: S, the module that computes the shortcut. None (default) passes the input on; give a module if `body`
            changes the shape.

    Raises:
        ConfigError: if `body` or `shortcut` is not an `nn.Module`.

    Example:
        ```python
        stack = mc.MaskedStack([mc.Residual(body) for body in bodies], fan_in=4, aggregation="residual")
        ```
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(body, nn.Module):
            raise ConfigError(f"body is of type {type(body).__name__}; it must be an nn.Module.")
        if shortcut is not None and not isinstance(shortcut, nn.Module):
            raise ConfigError(f"shortcut is of type {type(shortcut).__name__}; it must be an nn.Module.")
        self.residual, self.shortcut = body, nn.Identity() if shortcut is None else shortcut
        self._input_stays = False  # as one pass in inference mode has shown

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Return F(x) and S(x); further arguments go to F."""
        before, copy = version_of(x), None
        if not self._input_stays and is_plain(x) and x.is_inference():
            copy = x.clone()  # because torch counts no changes in inference mode
        residual = self.residual(x, *args, **kwargs)
        changed = copy is not None and not torch.equal(x.nan_to_num(), copy.nan_to_num())
        if changed or version_of(x) != before:
            raise ConnectivityError(
                "the body of an mc.Residual changed its input in place, which its shortcut reads too; use "
                "inplace=False in the first layer of the body."
            )
        if copy is not None and not copy.isnan().any():
            self._input_stays = True
        return Pair(residual, self.shortcut(x))


def is_plain(x: Any) -> bool:
    """Return whether x is a tensor whose values can be compared: no nested, meta, fake or traced one."""
    return type(x) is Tensor and not (x.is_nested or x.is_meta or torch.compiler.is_compiling())


def version_of(x: Any) -> int:
    """Return a number that grows with every change in place; 0 if torch does not count (inference mode, compiler)."""
    counted = isinstance(x, Tensor) and not torch.compiler.is_compiling() and not x.is_inference()
    return x._version if counted else 0


def is_pair(y: Any) -> bool:
    """Return whether y is a residual and a shortcut of the same shape."""
    if not isinstance(y, tuple) or len(y) != 2 or not all(isinstance(part, Tensor) for part in y):
        return False
    nested = y[0].is_nested, y[1].is_nested
    return all(nested) or (not any(nested) and y[0].shape == y[1].shape)


def describe_output(y: Any) -> str:
    """Describe the output of a block that is not a pair, for an error message."""
    if not isinstance(y, tuple):
        return f"an output of type {type(y).__name__}"
    shapes = [tuple(part.shape) if isinstance(part, Tensor) and not part.is_nested else "?" for part in y]
    return f"a tuple of {len(y)} with shapes {', '.join(map(str, shapes))}"


def combined(residual: Tensor, shortcut: Tensor, fan_in: int) -> Tensor:
    """Return y_k(K), the residual plus 1/K of the shortcut."""
    return residual + shortcut if fan_in == 1 else torch.add(residual, shortcut, alpha=1 / fan_in)


def mean_fan_in_of_readers(candidates: Sources, fan_in: Sequence[int]) -> list[float]:
    """Return the mean K of the targets that may read each module; 1 for modules that none may read."""
    first = len(candidates) - len(fan_in)
    readers: list[list[int]] = [[] for _ in candidates]
    for target, count in enumerate(fan_in, start=first):
        for k in candidates[target]:
            readers[k].append(count)
    return [sum(row) / len(row) if row else 1.0 for row in readers]
