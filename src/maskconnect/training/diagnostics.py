"""The scale of activations, as a run reports it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maskconnect.core.stack import MaskedStack
from maskconnect.errors import MaskConnectError


@torch.no_grad()
def activation_scales(network: nn.Module, x: Tensor) -> list[float | None]:
    """Return the root mean square of the inputs of each layer of the first stack, and of the output of the stack."""
    stack = next((part for part in network.modules() if isinstance(part, MaskedStack)), None)
    if stack is None:
        return []
    squares: dict[int, list[Tensor]] = {}

    def note(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            squares.setdefault(layer, []).append(args[0].float().square().mean())

        return hook

    modules, places = stack.flat(), stack.layout.places
    # Modules that are not alive run only once, to record their shapes.
    counted = [stack.learning or on for on in stack.masks.current_wiring().alive]
    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(note(layer))
        for module, (layer, _), on in zip(modules, places, counted, strict=True)
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
    """Return the scales of activations of one batch, or why they are unavailable."""
    try:
        return ", ".join("unread" if scale is None else f"{scale:.3g}" for scale in activation_scales(network, x))
    except MaskConnectError as error:
        return f"unavailable ({error})"
