"""Small networks that many tests share, and the same networks written by hand, without maskconnect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc


def mlp_blocks(count: int, width: int = 6) -> list[nn.Module]:
    """Blocks with a nonlinearity, so that it matters what feeds them."""
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def mlp_layers(layers: int, branches: int, width: int = 6) -> list[list[nn.Module]]:
    return [mlp_blocks(branches, width) for _ in range(layers)]


def conv_blocks() -> list[nn.Module]:
    """Six blocks in three stages of resolution, so that sources must be aligned."""
    widths = [(4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2), (16, 16, 1)]
    return [nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1), nn.Tanh()) for i, o, s in widths]


def taken(stack: nn.Module, count: int, x: Tensor) -> list[list[list[bool]]]:
    """The binary masks that a stack draws in `count` forward passes."""
    masks = []
    for _ in range(count):
        stack(x)
        masks.append(stack.masks.binary.tolist())
    return masks


def chain_by_hand(blocks: Sequence[nn.Module], wiring: list[list[int]], x: Tensor, mean: bool = True) -> Tensor:
    """A chain whose module j reads the modules `wiring[j]`."""
    outputs = [blocks[0](x)]
    for block, sources in zip(blocks[1:], wiring[1:], strict=True):
        inputs = sum(option_a(outputs[k], outputs[-1].shape) for k in sources)
        outputs.append(block(inputs / len(sources) if mean else inputs))
    return outputs[-1]


def layers_by_hand(layers: Sequence[Sequence[nn.Module]], wiring: list[Any], x: Tensor, mean: bool = True) -> Tensor:
    """Layers whose branch j reads the branches `wiring[i][j]` of the layer before."""
    outputs = [branch(x) for branch in layers[0]]
    for layer, rows in zip(layers[1:], wiring[1:], strict=True):
        inputs = [sum(outputs[k] for k in row) / (len(row) if mean else 1) for row in rows]
        outputs = [branch(x) for branch, x in zip(layer, inputs, strict=True)]
    return sum(outputs) / (len(outputs) if mean else 1)


def relaxed_chain(blocks: Sequence[nn.Module], mask_TS: Tensor, divisors: Sequence[int], x: Tensor) -> Tensor:
    """Eq. 1 with masks of any real value: x_j = (1/divisor_j) sum_k m_jk y_k over all earlier modules."""
    outputs = [blocks[0](x)]
    for t, block in enumerate(blocks[1:]):
        inputs = sum(mask_TS[t, k] * option_a(y, outputs[-1].shape) for k, y in enumerate(outputs))
        outputs.append(block(inputs / divisors[t]))
    return outputs[-1]


def relaxed_layers(
    layers: Sequence[Sequence[nn.Module]], mask_TS: Tensor, divisors: Sequence[int], x: Tensor, mean: bool
) -> Tensor:
    outputs, t = [branch(x) for branch in layers[0]], 0
    for layer in layers[1:]:
        inputs = []
        for _ in layer:
            inputs.append(sum(mask_TS[t, k] * y for k, y in enumerate(outputs)) / divisors[t])
            t += 1
        outputs = [branch(x) for branch, x in zip(layer, inputs, strict=True)]
    return sum(outputs) / (len(outputs) if mean else 1)


def option_a(y: Tensor, shape: torch.Size) -> Tensor:
    """The parameter-free shortcut of ResNet, written independently: average pooling of kernel 1 and a stride."""
    if y.shape == shape:
        return y
    stride = y.shape[-1] // shape[-1]
    return torch.cat([F.avg_pool2d(y, 1, stride), y.new_zeros(shape[0], shape[1] - y.shape[1], *shape[2:])], dim=1)


class EncoderBlock(nn.Module):
    """Attention and an MLP, each after a layer norm."""

    def __init__(self, width=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, key_padding_mask=None):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False, key_padding_mask=key_padding_mask)[0]
        return x + self.mlp(self.norm2(x))


def blending(stack, temperature=1.0, **options):
    """The stack, which blends its masks at a temperature: so far through very many steps."""
    steps = 10**9
    stack.masks.learn_by(mc.Blend(steps=steps + 1, **options))
    stack.masks.progress.fill_(round((1 - temperature) * steps))
    return stack
