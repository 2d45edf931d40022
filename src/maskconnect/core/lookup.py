"""Find the stacks and masks of a model; freeze and read its wiring."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError


def stacks_of(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    """Return every stack of a model under each of its names, outer stacks first."""
    named = _checked(model).named_modules(remove_duplicate=False)
    return [(name, part) for name, part in named if isinstance(part, MaskedStack)]


def masks_of(model: nn.Module) -> list[ConnectivityMasks]:
    """Return the masks of every stack in a model."""
    return [part for part in _checked(model).modules() if isinstance(part, ConnectivityMasks)]


def freeze(model: nn.Module) -> None:
    """Fix the wiring of every stack in `model` to the top-K of its masks, permanently.

    Call it when masks have learned, before fine-tuning. It warns if the options of learning have not reached their
    last step. Stacks that are frozen already do not change.

    Args:
        model: a model with at least one `MaskedStack`; it changes in place.

    Raises:
        ConfigError: if the model has no `MaskedStack`.

    Example:
        ```python
        mc.freeze(model)
        print(mc.wiring_of(model))  # [[], [0], [0, 1], [1, 2]]
        ```
    """
    stacks = require_stacks(model)
    learning = [stack.masks for stack in stacks.values() if not stack.masks.is_frozen]
    early = [masks for masks in learning if not masks.how.has_ended(masks.steps_taken)]
    if early:
        taken, how = early[0].steps_taken, early[0].how
        warnings.warn(
            f"the masks are frozen after {taken} of the {how.steps} steps of mc.{type(how).__name__}, so the network "
            "has not been trained with the frozen wiring alone; train for all steps, or fine-tune.",
            stacklevel=2,
        )
    for masks in learning:
        masks.freeze()


def wiring_of(model: nn.Module) -> Any:
    """Return the current wiring as plain data that fits into JSON and into the argument `connectivity`.

    This is the frozen wiring, or the top-K while masks are learned.

    Args:
        model: a model with at least one `MaskedStack`.

    Returns:
        For a model with one stack, a list of the sources of each module (layered: a list of such lists). For a model
        with several stacks, a dict of these lists by the name of the stack.

    Raises:
        ConfigError: if the model has no `MaskedStack`.

    Example:
        ```python
        wiring = mc.wiring_of(model)  # [[], [0], [0, 1], [1, 2]]: module 3 reads modules 1 and 2
        copy = mc.MaskedStack(blocks, connectivity=wiring)
        ```
    """
    wirings = {name: stack.wiring() for name, stack in require_stacks(model).items()}
    return wirings if len(wirings) > 1 else next(iter(wirings.values()))


def require_stacks(model: nn.Module) -> dict[str, MaskedStack]:
    """Return every stack of a model under the first of its names; raise a ConfigError if there is none."""
    found = {name: part for name, part in _checked(model).named_modules() if isinstance(part, MaskedStack)}
    if not found:
        raise ConfigError(
            f"there is no MaskedStack in this {type(model).__name__}; build one with mc.MaskedStack or mc.rewire."
        )
    return found


def replaced(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of a model, under all their names; the model changes in place and is returned."""
    parts = dict(model.named_modules(remove_duplicate=False))
    for name, part in parts.items():
        if part in made and name:
            above, _, last = name.rpartition(".")
            parts[above]._modules[last] = made[part]  # not by getattr, which returns the taps of a rewired list
    return made.get(model, model)


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    return model
