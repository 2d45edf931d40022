"""Whether a module is a dense block, from what it is made of and from what it computes on a small input.

The classes of timm and torchvision have no common base, and people write their own. So a block is recognised by its
layers, and then tried: the block against a `DenseStack` of its layers, and each layer with some of its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from maskconnect.core.lookup import replaced
from maskconnect.core.stack import without_trace
from maskconnect.errors import ConfigError, integer, shown
from maskconnect.retrofit.dense import DenseStack, widths_of
from maskconnect.retrofit.narrow import conv_of, narrowed, weighted

SIDE = 8
"""Of the images that a block is tried on."""


def is_dense_block(block: nn.Module) -> bool:
    """Whether a module has a forward of its own, and layers as children that each read more than the one before."""
    layers = list(block.children())
    plain = (nn.Sequential.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    if not layers or type(block).forward in plain or not all(map(_is_layer, layers)):
        return False
    return all(a < b for a, b in pairwise(conv_of(layer).in_channels for layer in layers))


def rewire_dense_blocks(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    fan_in: int | Sequence[int] | None,
    *,
    connectivity: str | Sequence[Any] | Mapping[str, Any],
    seed: int,
    **options: Any,
) -> nn.Module:
    """The model with a stack, with masks and a seed of its own, in the place of each of its dense `blocks`, by path."""
    if len(set(blocks.values())) < len(blocks):
        raise ConfigError(f"path is {shown(list(blocks))}, in which a block is named twice; name each block once.")
    wirings = connectivity if isinstance(connectivity, Mapping) else dict.fromkeys(blocks, connectivity)
    for path, block in blocks.items():
        if not is_dense_block(block):
            raise ConfigError(f"{path!r} is not a dense block; a list of names with a dense block in it has no others.")
        if path not in wirings:
            raise ConfigError(f"connectivity has wirings of {shown(list(wirings))}; it must have one of {path!r} too.")
    stacks = [
        _dense_stack(block, path, fan_in, connectivity=wirings[path], seed=integer("seed", seed) + offset, **options)
        for offset, (path, block) in enumerate(blocks.items())
    ]  # before the model changes, for one of them may be refused
    return replaced(model, dict(zip(blocks.values(), stacks, strict=True)))


def _dense_stack(
    block: nn.Module,
    path: str,
    fan_in: int | Sequence[int] | None,
    *,
    aggregation: Any = None,
    align: Any = None,
    mask_init: str | float | None = None,
    **options: Any,
) -> DenseStack:
    if aggregation not in (None, "concat") or align is not None:
        what = "align" if align is not None else f"aggregation {shown(aggregation)}"
        raise ConfigError(f"{path!r} is a dense block, whose layers read a concatenation; {what} does not apply.")
    check_dense_block(block, path)
    init = "uniform" if mask_init is None else mask_init
    stack = DenseStack(dict(block.named_children()), fan_in, mask_init=init, **options)
    stack.masks.to(conv_of(stack.flat()[1]).weight)
    for part in (stack, stack.masks, stack.flat()[0]):
        part.training = block.training  # but the layers stay in the modes that they are in
    return stack


def _is_layer(part: nn.Module) -> bool:
    norms = [getattr(part, name, None) for name in ("norm1", "norm2")]
    convs = [getattr(part, name, None) for name in ("conv1", "conv2")]
    return all(isinstance(norm, nn.Module) for norm in norms) and all(isinstance(conv, _ConvNd) for conv in convs)


def check_dense_block(block: nn.Module, path: str) -> None:
    """Raise an error unless the block is the concatenation of its layers, which read channels one by one."""
    layers = list(block.children())
    if len(layers) < 2:
        raise ConfigError(f"{path!r} has 1 layer, which has nothing to choose from; it needs at least 2.")
    if block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks:
        raise ConfigError(f"{path!r} has hooks, which a stack in its place would not run; remove them before.")
    for number, layer in enumerate(layers, start=1):
        _check_layer(layer, f"layer {number} of {path!r}")
    widths = widths_of(layers)
    for number, layer in enumerate(layers, start=1):
        if conv_of(layer).in_channels != sum(widths[:number]):
            raise ConfigError(
                f"layer {number} of {path!r} reads {conv_of(layer).in_channels} channels, where the input of a dense "
                f"block and the layers before it have {sum(widths[:number])}; its wiring cannot be learned."
            )
    if not conv_of(layers[0]).weight.is_meta:
        with without_trace(block, probing=True):
            _try(block, layers, path)


def _check_layer(layer: nn.Module, what: str) -> None:
    norm, conv = layer.norm1, conv_of(layer)
    if not isinstance(norm, _BatchNorm):
        raise ConfigError(
            f"norm1 of {what} is a {type(norm).__name__}; it must be a batch norm, which treats every channel by "
            "itself, so that some can be left out."
        )
    if conv.groups != 1 or conv.in_channels != norm.num_features:
        raise ConfigError(
            f"conv1 of {what} reads {conv.in_channels} channels in {conv.groups} groups; it must read the "
            f"{norm.num_features} channels of norm1 in 1 group."
        )


def _try(block: nn.Module, layers: Sequence[nn.Module], path: str) -> None:
    """Compare what the block computes with what a stack of its layers would."""
    weight = conv_of(layers[0]).weight
    shape = (2, weight.shape[1], *[SIDE] * (weight.dim() - 2))
    count = int(torch.Size(shape).numel())
    x = torch.linspace(0, count, count, dtype=torch.float32).sin().reshape(shape).to(weight)
    whole = DenseStack(dict(block.named_children()), connectivity="full")
    try:
        same = torch.equal(whole(x), block(x))
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the layers of {path!r} cannot be run on a list of features of shape {tuple(shape)}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    if not same:
        raise ConfigError(
            f"{path!r} is a {type(block).__name__} that does not compute the concatenation of its input and of what "
            "its layers return, as a dense block does; its wiring cannot be learned."
        )
    features = list(torch.split(whole(x), list(widths_of(layers)), dim=1))
    for number, layer in enumerate(layers[1:], start=2):
        if not all(_leaves_out(layer, features[:number], k) for k in (0, number - 1)):
            raise ConfigError(
                f"layer {number} of {path!r} reads its features in other ways than through norm1 and conv1, "
                "so none can be left out."
            )


def _leaves_out(layer: nn.Module, features: list[Tensor], k: int) -> bool:
    """Whether a layer that gets source k alone computes what it does with all others multiplied by 0."""
    widths = [y.shape[1] for y in features]
    mask_S = features[0].new_zeros(len(features), dtype=torch.float32)
    mask_S[k] = 1
    alone = narrowed(layer, widths, [k])([features[k]])
    masked = weighted(layer, widths, mask_S)(features)
    close = torch.finfo(alone.dtype).eps ** 0.5
    return torch.allclose(alone, masked, rtol=close, atol=close * float(masked.abs().max()))
