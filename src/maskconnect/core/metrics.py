"""`mc.metrics`: the progress of mask learning, as numbers for any logger."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from maskconnect.core.count import pruned_parameters
from maskconnect.core.lookup import masks_of, require_stacks
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.wiring import Sources
from maskconnect.errors import ConfigError


def metrics(model: nn.Module, before: Any = None) -> dict[str, float]:
    """Return numbers that describe the progress of mask learning, for any logger.

    The wiring of masks that are not frozen is their top-K.

    Args:
        model: a model with at least one `MaskedStack`.
        before: an earlier `mc.wiring_of(model)`, to count what has changed since; None (default) leaves this out.

    Returns:
        A dict with these keys.

        - `masks/entropy`: the mean over targets; 1 if all candidates are equally likely, 0 if one is certain.
        - `masks/moved`: the fraction of the learned connections that did not exist at the start.
        - `masks/changes`: the number of connections that did not exist in `before`; only if `before` is given.
        - `masks/alive`: the number of modules that can reach the output.
        - `masks/progress`: the number of optimizer steps that masks have learned for.
        - `masks/temperature`: 1 if sources are drawn or blended in proportion to the masks, 0 if the top-K is read.
        - `masks/frozen`: 1 if all masks are frozen, otherwise 0.
        - `masks/parameters`: the number of weights that pruning would leave now.

    Raises:
        ConfigError: if the model has no `MaskedStack`, or `before` belongs to another model.

    Example:
        ```python
        before = mc.wiring_of(model)
        train_one_epoch(model)
        logger.log(mc.metrics(model, before))
        ```
    """
    stacks = require_stacks(model)
    masks = masks_of(model)
    found = {
        "masks/entropy": mask_entropy(model),
        "masks/moved": _moved([m for m in masks if m.learned]),
        "masks/alive": float(sum(sum(m.current_wiring().alive) for m in masks)),
        "masks/progress": float(max(m.steps_taken for m in masks)),
        "masks/temperature": max(temperature(m) for m in masks),
        "masks/frozen": float(all(m.is_frozen for m in masks)),
        "masks/parameters": float(pruned_parameters(model).transitive),
    }
    if before is not None:
        given = before if len(stacks) > 1 else {next(iter(stacks)): before}
        if not isinstance(given, dict) or given.keys() != stacks.keys():
            raise ConfigError("before is the wiring of another model; pass an earlier mc.wiring_of(model).")
        then = [_rows(stack.layout.from_plain(given[name], what="before")) for name, stack in stacks.items()]
        found["masks/changes"] = float(changes(then, connections(model)))
    return found


def mask_entropy(model: nn.Module) -> float:
    """Return the entropy of the real masks: 1 if all candidates are equally likely, 0 if one is certain.

    This is the entropy of each target's mask divided by that of a uniform mask, averaged over all targets that have
    more than one candidate.
    """
    found: list[float] = []
    for masks in masks_of(model):
        for target, row in zip(masks.layout.targets, masks.real.detach().double().cpu(), strict=True):
            if (count := len(masks.candidates[target])) > 1:
                p = row / row.sum()
                entropy = float(torch.special.entr(p).sum()) / math.log(count)
                found.append(entropy if row.any() else 1.0)  # the next draw resets a row of zeros to uniform (D6)
    return sum(found) / len(found) if found else 0.0


def connections(model: nn.Module) -> list[list[list[int]]]:
    """Return the sources of every module in every stack: the frozen ones, or the top-K."""
    return [_rows(masks.current_wiring().sources) for masks in masks_of(model)]


def changes(before: list[list[list[int]]], after: list[list[list[int]]]) -> int:
    """Return the number of connections in `after` that are not in `before`."""
    pairs = [(old, new) for a, b in zip(before, after, strict=True) for old, new in zip(a, b, strict=True)]
    return sum(len(set(new) - set(old)) for old, new in pairs)


def temperature(masks: ConnectivityMasks) -> float:
    """Return the temperature of the next pass; 0 for frozen masks."""
    return 0.0 if masks.is_frozen else masks.how.temperature_after(masks.steps_taken)


def _moved(learned: list[ConnectivityMasks]) -> float:
    """Return the fraction of the connections that did not exist at the start."""
    start = [_rows(masks.first().sources) for masks in learned]
    total = sum(len(row) for rows in start for row in rows)
    return changes(start, [_rows(masks.current_wiring().sources) for masks in learned]) / total if total else 0.0


def _rows(sources: Sources) -> list[list[int]]:
    return [list(row) for row in sources]
