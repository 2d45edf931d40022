"""The learning rate of the masks, and what schedulers do to it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

GIVEN = "given_rates"
"""The key of the masks' parameter group under which `param_groups` notes (lr, mask_lr)."""


def mask_rate(optimizer: Optimizer, group: dict[str, Any], mask_lr: float | None) -> float:
    """The present learning rate of the masks that `group` holds.

    Without `mask_lr` it is that of the group. With `mask_lr` the group also holds weights: the masks follow its
    schedule, from a rate of their own.
    """
    lr = float(group["lr"])
    if mask_lr is None:
        return lr
    full = float(group.get("max_lr", group.get("initial_lr", optimizer.defaults["lr"])))
    return mask_lr * lr / full if full else mask_lr


def is_empty_step(real: Tensor, rate: float) -> bool:
    """Whether a step has neither a rate nor a gradient: torch.distributed.checkpoint sets up optimizers with one."""
    return rate == 0 and real.grad is not None and not real.grad.any()


def warn_of_one_rate(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Warn if a scheduler has given the masks the learning rate of the weights.

    OneCycleLR and CyclicLR set one rate for all groups unless they get a list. Other schedulers scale the rate that a
    group has, its `initial_lr`.
    """
    lr, mask_lr = group.get(GIVEN, (None, None))
    weights = next((other for other in optimizer.param_groups if other is not group), group)
    if lr == mask_lr or weights is group or "initial_lr" not in group:
        return
    if all(float(group[name]) == float(weights[name]) for name in ("lr", "initial_lr", "max_lr") if name in group):
        warnings.warn(
            f"a scheduler has replaced mask_lr={mask_lr:g} by {float(group['lr']):g}, the learning rate of the "
            "weights; give it one rate per group, such as max_lr=[lr, mask_lr].",
            stacklevel=2,
        )
