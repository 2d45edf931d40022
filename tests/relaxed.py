"""The rules of ResNeXt with masks of any real value, written without the stack.

The gradient of a mask must be the derivative of these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def reached(mask_LCC: Tensor) -> list[list[int]]:
    """Which branches of each module can reach the output, from binary masks (module, target, source)."""
    count = mask_LCC.shape[1]
    alive = [list(range(count))]
    for mask_CC in mask_LCC.flip(0):
        alive.insert(0, [k for k in range(count) if any(mask_CC[j, k] for j in alive[0])])
    return alive


def pooled_norm(norm: nn.BatchNorm2d, xs: list[Tensor], alive: list[int]) -> list[Tensor]:
    """Batch norm with the statistics of the branches that are alive."""
    values = torch.stack([xs[k] for k in alive])
    mean = values.mean((0, 1, 3, 4), keepdim=True)[0]
    variance = ((values - mean) ** 2).mean((0, 1, 3, 4), keepdim=True)[0]
    weight, bias = (p[:, None, None] for p in (norm.weight, norm.bias))
    return [(x - mean) / (variance + norm.eps).sqrt() * weight + bias for x in xs]


def relaxed_resnext(model: nn.Module, mask_LCC: Tensor, fan_in: int, x: Tensor) -> Tensor:
    """The scores of a ResNeXt of ours, in train mode; `mask_LCC` must round to the binary masks."""
    aggregation, spec = model.stack.aggregation, model.spec
    alive = reached(mask_LCC.detach().round())
    inputs = [model.stem(x)] * spec.cardinality
    for layer, branches in enumerate(model.stack.blocks):
        residual = [branch.residual(x) for branch, x in zip(branches, inputs, strict=True)]
        shortcut = inputs
        if str(layer) in aggregation.shortcuts:
            project = aggregation.shortcuts[str(layer)]
            shortcut = pooled_norm(project.norm.norm, [project.conv(x) for x in inputs], alive[layer])
        last = layer == len(mask_LCC)
        mask_CC, divisor = (torch.ones(1, len(branches)), len(branches)) if last else (mask_LCC[layer], fan_in)
        readers = [0] if last else alive[layer + 1]
        if spec.aggregation != "residual":  # whole blocks
            blocks = [F.relu(f + s) for f, s in zip(residual, shortcut, strict=True)]
            divisor = 1 if spec.aggregation == "sum" else divisor
            inputs = [sum(m * y for m, y in zip(row, blocks, strict=True)) / divisor for row in mask_CC]
            continue
        sums = [sum(m * y for m, y in zip(row, residual, strict=True)) for row in mask_CC]
        if spec.norm == "sum":
            sums = pooled_norm(aggregation.norms[layer].norm, sums, readers)
        means = [sum(m * y for m, y in zip(row, shortcut, strict=True)) / divisor for row in mask_CC]
        inputs = [F.relu(a + b) for a, b in zip(sums, means, strict=True)]
    return model.classifier(inputs[0].mean((2, 3)))
