"""`mc.metrics`: how far the masks of a model have come, as numbers for any logger."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from maskconnect.core.count import pruned_parameters
from maskconnect.core.lookup import masks_of, some_stacks_of
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.wiring import Sources
from maskconnect.errors import ConfigError


def metrics(model: nn.Module, before: Any = None) -> dict[str, float]:
    """How far the masks of a model have come.

    Args:
        model: a model with at least one `MaskedStack`.
        before: an earlier `mc.wiring_of(model)`, to count what has changed since.

    Returns:
        masks/entropy: 1 where all candidates of a target are equally likely, 0 where one is certain; the mean.
        masks/moved: the part of the learned connections that were not there at the start.
        masks/changes: the number of connections that were not there `before`; only if that is given.
        masks/alive: the number of modules that can reach the output.
        masks/progress: the number of optimizer steps that masks have learned for.
        masks/temperature: 1 where sources are drawn or blended in proportion to the masks, 0 where the top-K is read.
        masks/frozen: 1 where all masks are frozen, otherwise 0.
        masks/parameters: the number of weights that pruning would leave now.
        Of masks that are not frozen, the wiring is their top-K.
    """
    stacks = some_stacks_of(model)
    masks = masks_of(model)
    found = {
        "masks/entropy": mask_entropy(model),
        "masks/moved": _moved([m for m in masks if m.learned]),
        "masks/alive": float(sum(sum(m.settled().alive) for m in masks)),
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
    """How undecided the real masks are: 1 where all candidates are equally likely, 0 where one is certain.

    The entropy of each target's mask over that of a uniform one; the mean of all targets that have a choice.
    """
    found: list[float] = []
    for masks in masks_of(model):
        for target, row in zip(masks.layout.targets, masks.real.detach().double().cpu(), strict=True):
            if (count := len(masks.candidates[target])) > 1:
                p = row / row.sum()
                entropy = float(torch.special.entr(p).sum()) / math.log(count)
                found.append(entropy if row.any() else 1.0)  # the next draw starts such a row from uniform (D6)
    return sum(found) / len(found) if found else 0.0


def connections(model: nn.Module) -> list[list[list[int]]]:
    """For every stack, the sources of every module in it: the frozen ones, or the top-K."""
    return [_rows(masks.settled().sources) for masks in masks_of(model)]


def changes(before: list[list[list[int]]], after: list[list[list[int]]]) -> int:
    """How many connections there are now that there were not."""
    pairs = [(old, new) for a, b in zip(before, after, strict=True) for old, new in zip(a, b, strict=True)]
    return sum(len(set(new) - set(old)) for old, new in pairs)


def temperature(masks: ConnectivityMasks) -> float:
    """The temperature of the next pass; 0 once masks are frozen."""
    return 0.0 if masks.is_frozen else masks.how.temperature_after(masks.steps_taken)


def _moved(learned: list[ConnectivityMasks]) -> float:
    """The part of the connections that are not those of the start."""
    start = [_rows(masks.first().sources) for masks in learned]
    total = sum(len(row) for rows in start for row in rows)
    return changes(start, [_rows(masks.settled().sources) for masks in learned]) / total if total else 0.0


def _rows(sources: Sources) -> list[list[int]]:
    return [list(row) for row in sources]
