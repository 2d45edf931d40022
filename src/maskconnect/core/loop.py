"""What a training loop of one's own needs: parameter groups, the mask update, the freeze, the wiring."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.sampling import cooled
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError, unknown_name

EVEN = 0.1
"""How much of a mask `mc.attach(..., steps=N)` spreads evenly, so that no source is given up before it has learned."""
GRADIENTS = ("plain", "centred", "direction", "none")
"""What masks are updated with: dl/dm, that less its mean over the candidates of a target, the direction of that, or
nothing, as a control."""


def param_groups(
    model: nn.Module, lr: float, mask_lr: float, weight_decay: float = 0.0, *, mask_momentum: float = 0.0
) -> list[dict[str, Any]]:
    """Two groups for any torch optimizer: the weights, and the real masks with a rate of their own.

    The masks have no weight decay, and no momentum unless they are given some (D8). Their group stays when they are
    frozen, so that the state of an optimizer from before fits one made after; a model of fixed connectivity has the
    first group only.
    """
    rates = {"lr": lr, "mask_lr": mask_lr, "weight_decay": weight_decay, "mask_momentum": mask_momentum}
    for name, value in rates.items():
        if isinstance(value, bool | str) or not hasattr(value, "__float__") or not 0 <= float(value) < math.inf:
            raise ConfigError(f"{name} is {value!r}; it must be a number of 0 or more.")
    masks = masks_of(model)
    real = {id(m.real) for m in masks}
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in real]
    learned = [m.real for m in masks if m.learned]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr, "weight_decay": weight_decay}]
    if learned:
        groups.append({"params": learned, "lr": mask_lr, "weight_decay": 0.0, "momentum": mask_momentum})
    return groups


def attach(optimizer: Optimizer, model: nn.Module, *, gradient: str | None = None, steps: int | None = None) -> None:
    """Make every `optimizer.step()` update the masks of `model` as step 3 of Algorithm 1 does.

    m~ <- clip(m~ - lr * dl/dm, 0, 1), with the lr of the group that holds m~, so schedulers apply. SGD takes that
    step itself and the masks are only clipped after it; what any other optimizer did to them is undone first,
    because it rescales gradients (D15).

    With `steps`, which is how many of the optimizer's steps masks learn for, nothing is drawn: a module reads all its
    candidates in part, and more and more only the best K, in the last step those alone (`stack.masks.blend`, cooled).
    How many were taken is in the optimizer's state. A tenth of each mask is spread evenly, unless masks started in
    favour of some sources (`stack.masks.even`, which may be set to something else after this).

    `gradient` is "plain", the paper's dl/dm and the default without `steps`; "centred", that less its mean over the
    candidates of a target; "direction", that with length 1, so that the rate is how far a mask goes in a step: the
    default with `steps`; or "none", with which masks are drawn and never learn, as a control.
    """
    if gradient is None:
        gradient = "plain" if steps is None else "direction"
    if gradient not in GRADIENTS:
        raise unknown_name("gradient", gradient, GRADIENTS)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}; call mc.attach(optimizer, model).")
    masks = [m for m in masks_of(model) if not m.is_frozen]
    if masks and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS looks at the loss many times a step, and masks change with every look; give it the weights only, "
            "and the masks to an SGD of their own."
        )
    _groups_by_mask(optimizer, masks)
    for m in masks:
        if m.scheduled:  # by an attach before this one
            m.scheduled, m.blend, m.even, m.temperature = False, False, 0.0, 1.0
    if steps is not None and masks:
        _blend(optimizer, masks, steps)
    before: dict[int, Tensor] = {}

    def remember() -> None:
        before.update({id(m): m.real.detach().clone() for m in masks})

    def look() -> None:
        remember()
        for m in masks:
            if not m.is_frozen:
                m.shape_gradient_(gradient)

    def prepare(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            look()
            return args, kwargs

        def noted() -> Any:
            loss = closure()
            look()  # the forward pass in the closure has normalised the masks
            return loss

        return args[:1], {**kwargs, "closure": noted}

    @torch.no_grad()
    def update(*_: Any) -> None:
        learning = [m for m in masks if not m.is_frozen]
        for m, group in zip(learning, _groups_by_mask(optimizer, learning), strict=True):
            if type(optimizer) is not torch.optim.SGD:
                m.real.copy_(before[id(m)])
                _descend_(m.real, group, optimizer)
            m.clip_()

    optimizer.register_step_pre_hook(prepare)
    optimizer.register_step_post_hook(update)


def _blend(optimizer: Optimizer, masks: list[ConnectivityMasks], steps: int) -> None:
    """Blend the masks from now on, at a temperature that goes from 1 to 0 in so many steps of the optimizer."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps is {steps!r}; it must be how many optimizer steps the masks learn for, 1 or more.")

    def follow(*_: Any, taken: int = 0) -> None:
        learning = [m for m in masks if not m.is_frozen]
        groups = _groups_by_mask(optimizer, learning)
        for group in {id(group): group for group in groups}.values():
            group["steps_taken"] = group.get("steps_taken", 0) + taken
        for m, group in zip(learning, groups, strict=True):
            m.temperature = cooled(1.0, 0.0, group["steps_taken"], steps)

    for m in masks:
        m.scheduled, m.blend, m.even = True, True, EVEN if m.decay == 1 else 0.0
    follow()
    optimizer.register_step_post_hook(partial(follow, taken=1))
    optimizer.register_load_state_dict_post_hook(follow)


def _groups_by_mask(optimizer: Optimizer, masks: list[ConnectivityMasks]) -> list[dict[str, Any]]:
    """The group that holds each of the masks."""
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if not all(id(m.real) in held for m in masks):
        raise ConfigError(
            "the optimizer does not hold the masks of this model; make it with mc.param_groups(model, ...), "
            "after the model has been loaded or moved."
        )
    return [held[id(m.real)] for m in masks]


def _descend_(real: Tensor, group: dict[str, Any], optimizer: Optimizer) -> None:
    """m~ <- m~ - lr * dl/dm, in place, unless a GradScaler told a fused optimizer to skip this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    if real.grad is None or (found_inf is not None and found_inf.item()):
        return
    step = real.grad * group["lr"]
    real.sub_(-step if group.get("maximize") else step)


def freeze(model: nn.Module) -> None:
    """Fix the wiring of every stack in `model` to the top-K of its masks, for fine-tuning and for good."""
    if isinstance(model, DistributedDataParallel) and any(not m.is_frozen for m in masks_of(model)):
        raise ConfigError(
            "DistributedDataParallel would go on waiting for the gradient of the masks; "
            "call mc.freeze(model.module), then wrap it anew."
        )
    for _, stack in _stacks(model):
        stack.masks.freeze()


def wiring_of(model: nn.Module) -> Any:
    """The present wiring as plain data, which JSON keeps and `connectivity` takes.

    Of a model with one stack, what each of its modules reads; of one with several, a dict of those by name.
    """
    wirings = {name: stack.wiring() for name, stack in _stacks(model)}
    return wirings if len(wirings) > 1 else next(iter(wirings.values()))


def _stacks(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    found = [(name, part) for name, part in _checked(model).named_modules() if isinstance(part, MaskedStack)]
    if not found:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    return found


def masks_of(model: nn.Module) -> list[ConnectivityMasks]:
    """The masks of every stack in a model."""
    return [part for part in _checked(model).modules() if isinstance(part, ConnectivityMasks)]


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    return model
