"""What a training loop of one's own needs: parameter groups, the mask update, the freeze, the wiring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError


def param_groups(model: nn.Module, lr: float, mask_lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Two groups for any torch optimizer: the weights, and the real masks with a rate of their own.

    The masks have no momentum and no weight decay (D8). A model whose masks are all fixed has the first group only.
    """
    for name, value in (("lr", lr), ("mask_lr", mask_lr), ("weight_decay", weight_decay)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{name} is {value!r}; it must be a number of 0 or more.")
    masks = [m.real for m in _masks(model) if not m.is_frozen]
    known = {id(real) for real in masks}
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr, "weight_decay": weight_decay}]
    if masks:
        groups.append({"params": masks, "lr": mask_lr, "weight_decay": 0.0, "momentum": 0.0})
    return groups


def attach(optimizer: Optimizer, model: nn.Module) -> None:
    """Make every `optimizer.step()` update the masks of `model` as step 3 of Algorithm 1 does.

    m~ <- clip(m~ - lr * dl/dm, 0, 1), with the lr of the group that holds m~, so schedulers apply. SGD takes that
    step itself and the masks are only clipped after it; what any other optimizer did to them is undone first,
    because it rescales gradients (D15).
    """
    masks = [m for m in _masks(model) if not m.is_frozen]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(m.real) not in held for m in masks):
        raise ConfigError(
            "the optimizer does not hold the masks of this model; make it with mc.param_groups(model, ...)."
        )
    before: dict[int, Tensor] = {}

    def remember(*_: Any) -> None:
        before.update({id(m): m.real.detach().clone() for m in masks})

    @torch.no_grad()
    def update(*_: Any) -> None:
        for m in masks:
            if not m.is_frozen:
                if not isinstance(optimizer, torch.optim.SGD):
                    m.real.copy_(before[id(m)])
                    _descend_(m.real, optimizer)
                m.clip_()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(update)


def _descend_(real: Tensor, optimizer: Optimizer) -> None:
    """m~ <- m~ - lr * dl/dm, in place, unless a GradScaler told a fused optimizer to skip this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    if real.grad is None or (found_inf is not None and found_inf.item()):
        return
    group = next(group for group in optimizer.param_groups if any(p is real for p in group["params"]))
    step = real.grad * group["lr"]
    real.sub_(-step if group.get("maximize") else step)


def freeze(model: nn.Module) -> None:
    """Fix the wiring of every stack in `model` to the top-K of its masks, for fine-tuning and for good."""
    for _, stack in _stacks(model):
        stack.masks.freeze()


def wiring_of(model: nn.Module) -> Any:
    """The present wiring as plain data, which JSON keeps and `connectivity` takes.

    Of a model with one stack, what each of its modules reads; of one with several, a dict of those by name.
    """
    wirings = {name: stack.wiring() for name, stack in _stacks(model)}
    return wirings if len(wirings) > 1 else next(iter(wirings.values()))


def _stacks(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, MaskedStack)]
    if not found:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    return found


def _masks(model: nn.Module) -> Iterator[ConnectivityMasks]:
    return (part for part in model.modules() if isinstance(part, ConnectivityMasks))
