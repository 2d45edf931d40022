"""Tables 6 and 7: the ResNeXt architectures, layer by layer, read from the networks that `build` returns."""

from __future__ import annotations

import torch
from torch import nn

from maskconnect.core.stack import MaskedStack
from maskconnect.models import ResNeXtSpec, build

NETWORKS = {
    "table6": ("cifar", ((20, 4, 8), (29, 4, 8), (29, 8, 8), (29, 64, 8))),
    "table7": ("mini", ((20, 4, 8), (29, 8, 8))),
}


def architecture(stem: str, depth: int, width: int, cardinality: int, classes: int = 100) -> list[str]:
    """Return the layers of a network as the paper writes them: input channels, size, output channels."""
    spec = ResNeXtSpec(
        depth=depth, width=width, cardinality=cardinality, num_classes=classes, connectivity="full", stem=stem
    )
    with torch.device("meta"):
        network = build(spec)
    stack = next(part for part in network.modules() if isinstance(part, MaskedStack))
    inside = set(stack.modules())
    lines = [_layer(part) for part in network.modules() if part not in inside and isinstance(part, nn.Conv2d)]
    lines += ["max pool, 3x3, stride 2" for part in network.modules() if isinstance(part, nn.MaxPool2d)]
    modules = []
    for members in stack.layout.layers:
        branch = stack.flat()[members.start]
        shape = "; ".join(_layer(part) for part in branch.modules() if isinstance(part, nn.Conv2d))
        modules.append(f"[{shape}] (C={len(members)})")
    for module in dict.fromkeys(modules):
        lines.append(module + (f", x{modules.count(module)}" if modules.count(module) > 1 else ""))
    last = next(part for part in network.modules() if isinstance(part, nn.Linear))
    return [*lines, "average pool", f"{last.out_features} fc, softmax"]


def _layer(part: nn.Module) -> str:
    assert isinstance(part, nn.Conv2d)
    return f"{part.in_channels}, {part.kernel_size[0]}x{part.kernel_size[1]}, {part.out_channels}"
