"""The learning rate of the masks, and how schedulers change it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

GIVEN = "given_rates"
"""The key in the parameter group of masks under which `param_groups` stores (lr, mask_lr)."""


def mask_rate(optimizer: Optimizer, group: dict[str, Any], mask_lr: float | None) -> float:
    """Return the current learning rate of the masks in `group`.

    Without `mask_lr`, this is the rate of the group. With `mask_lr`, the group also holds weights: masks then start
    from `mask_lr` and follow the schedule of the group.
    """
    lr = float(group["lr"])
    if mask_lr is None:
        return lr
    full = float(group.get("max_lr", group.get("initial_lr", optimizer.defaults["lr"])))
    return mask_lr * lr / full if full else mask_lr


def is_empty_step(real: Tensor, rate: float) -> bool:
    """Return whether rate and gradient are zero, as when torch.distributed.checkpoint initializes an optimizer."""
    return rate == 0 and real.grad is not None and not real.grad.any()


def warn_of_shared_rate(groups: Sequence[dict[str, Any]], real: Collection[Tensor]) -> None:
    """Warn if one of the groups, which hold masks, also holds weights: their learning rate is too low for masks."""
    masks = {id(p) for p in real}
    for group in groups:
        if any(p.requires_grad and id(p) not in masks for p in group["params"]):
            warnings.warn(
                f"masks share the learning rate {float(group.get('initial_lr', group['lr'])):g} of the weights; build "
                "the optimizer from mc.param_groups(model, lr=..., mask_lr=...), or pass mask_lr to mc.attach.",
                stacklevel=3,
            )
            return


def warn_of_one_rate(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Warn if a scheduler has given the masks the learning rate of the weights.

    OneCycleLR and CyclicLR set the same rate for all groups unless they get a list. Other schedulers scale the
    `initial_lr` of each group.
    """
    lr, mask_lr = group.get(GIVEN, (None, None))
    weights = next((other for other in optimizer.param_groups if other is not group), group)
    if lr == mask_lr or weights is group or "initial_lr" not in group:
        return
    if all(float(group[name]) == float(weights[name]) for name in ("lr", "initial_lr", "max_lr") if name in group):
        warnings.warn(
            f"a scheduler has replaced mask_lr={mask_lr:g} by {float(group['lr']):g}, the learning rate of the "
            "weights. Give the scheduler one rate per group, such as max_lr=[lr, mask_lr].",
            stacklevel=2,
        )
