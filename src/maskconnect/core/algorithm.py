"""Algorithm 1 of the paper in plain code: the oracle against which the stack, its masks and all fast paths are tested.

    repeat    1. normalize the real masks, and draw K distinct sources per target from them
              2. forward pass with the binary masks (Eq. 1); backward pass by autograd; update the weights
              3. real masks <- clip(real masks - mask_lr * gradient by the binary masks, 0, 1)

Modules are numbered in the order in which they run. `candidates[j]` are the modules that module j may read: in a chain,
all before it; in layers, those of the layer before. A module without candidates reads the input. Masks have one row per
module, with one entry per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Join = Callable[[Sequence[Any], Tensor], Any]
Rows = Sequence[Tensor]


def normalized(real: Rows) -> list[Tensor]:
    """Divide every row by its sum."""
    return [row / row.sum() if len(row) else row for row in real]


def draw(real: Rows, fan_in: int, generator: torch.Generator) -> list[Tensor]:
    """Draw up to `fan_in` distinct sources per row, one after the other, in proportion to the real masks (step 1)."""
    masks = [torch.zeros_like(row) for row in real]
    for row, mask in zip(real, masks, strict=True):
        for _ in range(min(fan_in, len(row))):
            left = torch.where(mask == 0, row, 0)
            if not left.any():  # sources of weight 0 are drawn only if no others are left (D6)
                left = torch.where(mask == 0, 1.0, 0)
            mask[torch.multinomial(left, 1, generator=generator)] = 1
    return masks


def mean(sources: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return Eq. 1 divided by K, which is treated as a constant (D1)."""
    return total(sources, mask) / float(mask.detach().sum())


def total(sources: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return Eq. 1: x_j = sum_k m_jk y_k."""
    return torch.stack([m * y for m, y in zip(mask, sources, strict=True)]).sum(dim=0)


def residual(sources: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Sum residuals, average shortcuts, and apply a ReLU (D1)."""
    residuals, shortcuts = zip(*sources, strict=True)
    return torch.relu(total(residuals, mask) + mean(shortcuts, mask))


def forward(
    modules: Sequence[nn.Module], candidates: Sequence[Sequence[int]], masks: Rows, x: Tensor, join: Join
) -> Any:
    """Run every module on the join of its sources, and return the output of the last one (step 2)."""
    outputs: list[Any] = []
    for module, sources, mask in zip(modules, candidates, masks, strict=True):
        outputs.append(module(join([outputs[k] for k in sources], mask) if sources else x))
    return outputs[-1]


def iterate(
    modules: Sequence[nn.Module],
    candidates: Sequence[Sequence[int]],
    real: Rows,
    fan_in: int,
    losses: Iterable[Callable[[Callable[..., Any]], Tensor]],
    generator: torch.Generator,
    **rates: Any,
) -> list[Tensor]:
    """Run Algorithm 1, one iteration per loss, and return the real masks after the last."""
    real = list(real)
    for loss_of in losses:
        real = normalized(real)
        real = step(modules, candidates, real, draw(real, fan_in, generator), loss_of, **rates)
    return real


def step(
    modules: Sequence[nn.Module],
    candidates: Sequence[Sequence[int]],
    real: Rows,
    masks: Rows,
    loss_of: Callable[[Callable[..., Any]], Tensor],
    *,
    lr: float,
    mask_lr: float,
    join: Join = mean,
) -> list[Tensor]:
    """Run steps 2 and 3 with given binary masks: plain SGD on the weights, in place; return the new real masks.

    `loss_of` gets the network as a function of its input, and returns the loss.
    """
    rows = [mask.detach().clone().requires_grad_() for mask in masks]
    weights = [p for module in modules for p in module.parameters()]
    loss = loss_of(lambda x: forward(modules, candidates, rows, x, join))
    used = torch.autograd.grad(loss, [*rows, *weights], allow_unused=True, materialize_grads=True)
    grads, slopes = used[: len(rows)], used[len(rows) :]
    with torch.no_grad():
        for p, slope in zip(weights, slopes, strict=True):
            p.sub_(lr * slope)
        return [(row - mask_lr * grad).clamp(0, 1) for row, grad in zip(real, grads, strict=True)]
