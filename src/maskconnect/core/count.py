"""How large a network is: its weights, and apart from them the masks that learn how to wire it."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from maskconnect.core.loop import masks_of


class ParameterCount(NamedTuple):
    """What `mc.count_parameters` returns."""

    weights: int  # what the paper's tables count; the same for every fan-in
    mask_entries: int  # candidate connections whose masks are, or were, learned


def count_parameters(model: nn.Module) -> ParameterCount:
    """The number of weights, and of the entries of learned masks, in a model."""
    masks = masks_of(model)
    real = {id(m.real) for m in masks}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in real)
    return ParameterCount(weights, sum(m.entries for m in masks if m.learned))
