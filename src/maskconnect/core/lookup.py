"""Find the stacks and masks of a model; freeze its wiring, and read it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError


def stacks_of(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    """Every stack of a model under each of its names, outer ones first."""
    named = _checked(model).named_modules(remove_duplicate=False)
    return [(name, part) for name, part in named if isinstance(part, MaskedStack)]


def masks_of(model: nn.Module) -> list[ConnectivityMasks]:
    """The masks of every stack in a model."""
    return [part for part in _checked(model).modules() if isinstance(part, ConnectivityMasks)]


def freeze(model: nn.Module) -> None:
    """Fix the wiring of every stack in `model` to the top-K of its masks, for fine-tuning and for good."""
    stacks = some_stacks_of(model)
    learning = [stack.masks for stack in stacks.values() if not stack.masks.is_frozen]
    early = [masks for masks in learning if not masks.how.has_ended(masks.steps_taken)]
    if early:
        warnings.warn(
            f"the masks are frozen after {early[0].steps_taken} optimizer steps, before {early[0].how} has ended: "
            "the network has never been trained with the frozen wiring alone.",
            stacklevel=2,
        )
    for masks in learning:
        masks.freeze()


def wiring_of(model: nn.Module) -> Any:
    """The present wiring as plain data, which JSON keeps and `connectivity` takes.

    Of a model with one stack, what each of its modules reads; of one with several, a dict of those by name.
    """
    wirings = {name: stack.wiring() for name, stack in some_stacks_of(model).items()}
    return wirings if len(wirings) > 1 else next(iter(wirings.values()))


def some_stacks_of(model: nn.Module) -> dict[str, MaskedStack]:
    """Every stack of a model under the first of its names; an error if there is none."""
    found = {name: part for name, part in _checked(model).named_modules() if isinstance(part, MaskedStack)}
    if not found:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    return found


def replaced(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The model with other modules in the place of some of its own, under all their names; changed in place."""
    parts = dict(model.named_modules(remove_duplicate=False))
    for name, part in parts.items():
        if part in made and name:
            above, _, last = name.rpartition(".")
            parts[above]._modules[last] = made[part]  # not by getattr, for which a rewired list has taps
    return made.get(model, model)


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    return model
