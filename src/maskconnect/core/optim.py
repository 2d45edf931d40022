"""`mc.param_groups` and `mc.attach`: the mask update of Algorithm 1 (step 3) in any training loop."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from maskconnect.core.draw import Draw
from maskconnect.core.learning import Learning, check_credit
from maskconnect.core.lookup import masks_of, require_stacks
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.rates import GIVEN, is_empty_step, mask_rate, warn_of_one_rate, warn_of_shared_rate
from maskconnect.core.removal import apply_budget_, only_removes, worth_of_modules
from maskconnect.errors import ConfigError, number, shown

_updates: WeakKeyDictionary[ConnectivityMasks, ReferenceType[MaskUpdate]] = WeakKeyDictionary()
"""The update that `attach` made for each of the masks; the optimizer keeps it alive."""


def param_groups(model: nn.Module, lr: float, mask_lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer: the weights, and the real masks with their own learning rate.

    Masks have no weight decay and no momentum (D8). Their group remains when masks are frozen, so that the saved state
    of an optimizer still loads.

    Args:
        model: a model with or without `MaskedStack`s.
        lr: the learning rate of the weights.
        mask_lr: the learning rate of the real masks.
        weight_decay: the weight decay of the weights; 0 by default.

    Returns:
        A list of one or two groups. A model without learned masks has the group of weights only.

    Raises:
        ConfigError: if a rate is negative or not finite.

    Example:
        ```python
        groups = mc.param_groups(model, lr=0.1, mask_lr=0.03, weight_decay=1e-4)
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        ```
    """
    for name, value in {"lr": lr, "mask_lr": mask_lr, "weight_decay": weight_decay}.items():
        if not 0 <= number(name, value) < math.inf:
            raise ConfigError(f"{name} is {shown(value)}; it must be a finite number of 0 or more.")
    masks = masks_of(model)
    real = {id(m.real) for m in masks}
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in real]
    learned = [m.real for m in masks if m.learned]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": lr, "weight_decay": weight_decay}]
    if learned:
        given = float(lr), float(mask_lr)
        groups.append({"params": learned, "lr": mask_lr, "weight_decay": 0.0, "momentum": 0.0, GIVEN: given})
    return groups


def attach(
    optimizer: Optimizer, model: nn.Module, how: Learning | None = None, *, mask_lr: float | None = None
) -> None:
    """Make every `optimizer.step()` also update the masks of `model` (Algorithm 1, step 3).

    The update is m~ <- clip(m~ - lr * dl/dm, 0, 1), with the learning rate of the group that holds the masks, so
    schedulers apply. Changes that the optimizer itself makes to masks (momentum, weight decay, rescaled gradients) are
    undone (D8, D15).

    Calling it again replaces the previous options. If `how` is the same, as after loading a `state_dict`, learning
    continues at the same step; otherwise it starts at step 0.

    Args:
        optimizer: an optimizer made with `mc.param_groups(model, ...)`.
        model: a model with at least one `MaskedStack`.
        how: how masks learn. None (default) means `mc.Draw()`, Algorithm 1 as published. `mc.Blend(steps=N)` reads a
            weighted mix of all candidates and ends with the top-K after N steps. `mc.Blend(steps=N,
            keep=0.6)` also learns which modules to remove.
        mask_lr: the learning rate of masks if the optimizer was not made with `mc.param_groups`, but by a trainer that
            mixes masks with weights. It follows the schedule of the group that holds the masks. None (default) uses the
            rate of that group, with a warning if the group also holds weights.

    Raises:
        ConfigError: if the model has no `MaskedStack`, the optimizer does not hold its masks, or `how` does not fit.

    Example:
        ```python
        optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.03), momentum=0.9)
        mc.attach(optimizer, model, mc.Blend(steps=1000))
        loss(model(x), y).backward()
        optimizer.step()  # updates weights and masks
        ```
    """
    if mask_lr is not None and not 0 <= number("mask_lr", mask_lr) < math.inf:
        raise ConfigError(f"mask_lr is {shown(mask_lr)}; it must be a finite number of 0 or more.")
    how = Draw() if how is None else how
    if not isinstance(how, Learning):
        raise ConfigError(f"how is {shown(how)}; it must be mc.Draw() or mc.Blend(steps=N).")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; call mc.attach(optimizer, model) with a torch optimizer."
        )
    stacks = [stack for stack in require_stacks(model).values() if not stack.masks.is_frozen]
    priced: dict[ConnectivityMasks, Learning] = {}
    for stack in stacks:
        check_credit(how.credit, stack.aggregation)
        priced[stack.masks] = how.priced(stack.flat(), stack.layout)
        stack.masks.check_budget(priced[stack.masks])
    masks = [stack.masks for stack in stacks]
    if masks and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times per step, and masks change each time. Give LBFGS the weights only, "
            "and the masks to a separate SGD."
        )
    if not all(m.real.requires_grad for m in masks):
        raise ConfigError(
            "requires_grad of the real masks was turned off, so they would never learn. Call "
            "stack.masks.real.requires_grad_(), or mc.freeze(model) if they should not learn."
        )
    groups = groups_of(optimizer, masks)
    if mask_lr is None and how.gradient != "none":
        warn_of_shared_rate(groups, [m.real for m in masks_of(model)])
    held = _groups_by_parameter(optimizer)
    kept = [m for m in masks_of(model) if id(m.real) in held]  # also frozen ones, so that no optimizer changes them
    for m in kept:
        m.learn_by(priced.get(m, how))
        if m in _updates and (before := _updates[m]()) is not None:
            before.drop(m)
    if kept:
        update = ref(MaskUpdate(optimizer, kept, None if mask_lr is None else float(mask_lr)))
        _updates.update(dict.fromkeys(kept, update))


def advance(model: nn.Module) -> None:
    """Count a learning step that the optimizer skipped, so that blending still ends in time."""
    for m in masks_of(model):
        if not m.is_frozen:
            m.count_step()


class Noted(NamedTuple):
    """The state of masks before a step."""

    real: Tensor
    grad: Tensor | None  # as it will be subtracted from the real masks
    square: Tensor | None  # the running mean of squared gradients, including this one
    worth_M: Tensor | None  # the worth of every module, if there is a budget


class MaskUpdate:
    """The hooks of one optimizer that update masks."""

    def __init__(self, optimizer: Optimizer, masks: list[ConnectivityMasks], mask_lr: float | None = None) -> None:
        self.masks, self.mask_lr, self.steps = masks, mask_lr, 0
        self.noted: dict[int, Noted] = {}
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self.prepare),
            optimizer.register_step_post_hook(self.update),
        ]

    def drop(self, masks: ConnectivityMasks) -> None:
        """Stop updating these masks; another update takes over."""
        self.masks = [m for m in self.masks if m is not masks]
        if not self.masks:
            for handle in self.handles:
                handle.remove()

    def prepare(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the step, note the real masks and what will be subtracted from them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.note(optimizer)
            return args, kwargs

        def noted() -> Any:
            loss = closure()
            self.note(optimizer)  # the forward pass in the closure has normalized the masks
            return loss

        return args[:1], {**kwargs, "closure": noted}

    @torch.no_grad()
    def note(self, optimizer: Optimizer) -> None:
        """Remember the real masks, and their gradient as it will be subtracted."""
        scale = getattr(optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers
        for m in self.masks:
            grad, square, worth_M = m.real.grad, None, None
            if grad is not None and not m.is_frozen:
                grad = grad if scale is None else grad / scale
                worth_M = worth_of_modules(m, grad)
                square = m.how.squares(grad, m.square)
                descent = None if only_removes(m) else m.how.descent(grad, m.candidate_TS, square, m.steps_taken)
                grad = None if descent is None else descent.clone()
            self.noted[id(m)] = Noted(m.real.detach().clone(), grad, square, worth_M)

    @torch.no_grad()
    def update(self, optimizer: Optimizer, *_: Any) -> None:
        """After the step, set m~ <- clip(m~ - lr * dl/dm, 0, 1), within the budget if any; frozen masks stay."""
        self.steps += 1
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf.item())  # set by a GradScaler for fused optimizers
        for m, group in zip(self.masks, groups_of(optimizer, self.masks), strict=True):
            before = self.noted.pop(id(m), Noted(m.real, None, None, None))
            m.real.copy_(before.real)
            rate = mask_rate(optimizer, group, self.mask_lr)
            if not m.is_frozen and not is_empty_step(m.real, rate):
                if skipped:
                    before = Noted(before.real, None, None, None)
                _descend_(m, before, group, rate)
                m.count_step()
                apply_budget_(m, before.worth_M, rate)
                if self.steps == 2 and self.mask_lr is None:  # in step 1, any schedule may have equal rates
                    warn_of_one_rate(optimizer, group)


def groups_of(optimizer: Optimizer, masks: list[ConnectivityMasks]) -> list[dict[str, Any]]:
    """Return the parameter group that holds each of the masks."""
    held = _groups_by_parameter(optimizer)
    if not all(id(m.real) in held for m in masks):
        raise ConfigError(
            "the optimizer does not hold the masks of this model. Make it with mc.param_groups(model, ...), "
            "after the model has been loaded or moved."
        )
    return [held[id(m.real)] for m in masks]


def _groups_by_parameter(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Return the parameter group of every parameter, by the id of the parameter."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _descend_(masks: ConnectivityMasks, before: Noted, group: dict[str, Any], rate: float) -> None:
    """Set m~ <- clip(m~ - lr * dl/dm, 0, 1), in place."""
    if before.grad is not None:
        rate *= masks.how.rate_after(masks.steps_taken)
        masks.real.add_(before.grad, alpha=rate if group.get("maximize") else -rate)
    if before.square is not None and before.square is not masks.square:
        masks.square.copy_(before.square)
    masks.clip_()
