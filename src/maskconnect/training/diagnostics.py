"""What a run tells about its masks and activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maskconnect.core.lookup import masks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import MaskConnectError


def mask_entropy(network: nn.Module) -> float:
    """How undecided the real masks are: 1 where all candidates are equally likely, 0 where one is certain.

    The entropy of each target's mask over that of a uniform one; the mean of all targets that have a choice.
    """
    found: list[float] = []
    for masks in masks_of(network):
        for target, row in zip(masks.layout.targets, masks.real.detach().double().cpu(), strict=True):
            if (count := len(masks.candidates[target])) > 1:
                p = row / row.sum()
                entropy = float(torch.special.entr(p).sum()) / math.log(count)
                found.append(entropy if row.any() else 1.0)  # the next draw starts such a row from uniform (D6)
    return sum(found) / len(found) if found else 0.0


def connections(network: nn.Module) -> list[list[list[int]]]:
    """For every stack, the sources of every module in it: the frozen ones, or the top-K."""
    return [[list(row) for row in masks.settled().sources] for masks in masks_of(network)]


def changes(before: list[list[list[int]]], after: list[list[list[int]]]) -> int:
    """How many connections there are now that there were not."""
    pairs = [(old, new) for a, b in zip(before, after, strict=True) for old, new in zip(a, b, strict=True)]
    return sum(len(set(new) - set(old)) for old, new in pairs)


@torch.no_grad()
def activation_scales(network: nn.Module, x: Tensor) -> list[float | None]:
    """The root mean square of what the modules of each layer of the (first) stack read, and of the stack's output."""
    stack = next((part for part in network.modules() if isinstance(part, MaskedStack)), None)
    if stack is None:
        return []
    squares: dict[int, list[Tensor]] = {}

    def note(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            squares.setdefault(layer, []).append(args[0].float().square().mean())

        return hook

    modules, places = stack.flat(), stack.layout.places
    asked = [stack.learning or on for on in stack.masks.settled().alive]  # others run once, to learn their shapes
    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(note(layer))
        for module, (layer, _), on in zip(modules, places, asked, strict=True)
        if on
    ]
    end = len(stack.layout.layers)
    handles.append(
        stack.register_forward_hook(lambda _m, _a, y: squares.setdefault(end, []).append(y.float().square().mean()))
    )
    try:
        network(x)
    finally:
        for handle in handles:
            handle.remove()
    return [
        round(math.sqrt(float(torch.stack(found).mean())), 6) if found else None
        for found in (squares.get(layer, []) for layer in range(end + 1))
    ]


def scales_in_words(network: nn.Module, x: Tensor) -> str:
    """The scales of activations of one batch, where they can be had."""
    try:
        return ", ".join("unread" if scale is None else f"{scale:.3g}" for scale in activation_scales(network, x))
    except MaskConnectError as error:
        return f"not to be had ({error})"
