"""Recognize a dense block by its layers, and by what it computes on a small input.

The classes of timm and torchvision have no common base, and users write their own. So a block is recognized by its
layers, and then tested: the block against a `DenseStack` of its layers, and each layer with some of its sources.
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
from maskconnect.core.probing import without_trace
from maskconnect.errors import ConfigError, integer, shown
from maskconnect.retrofit.dense import DenseStack, widths_of
from maskconnect.retrofit.narrow import conv_of, narrowed, weighted

SIDE = 8
"""The side of the images that a block is tested on."""


def is_dense_block(block: nn.Module) -> bool:
    """Return whether a module has its own forward, and its children are layers with growing numbers of inputs."""
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
    """Replace each of the dense `blocks` (by path) of a model by a stack with its own masks and seed."""
    if len(set(blocks.values())) < len(blocks):
        raise ConfigError(f"path is {shown(list(blocks))}; a block is named twice. Name each block once.")
    wirings = connectivity if isinstance(connectivity, Mapping) else dict.fromkeys(blocks, connectivity)
    for path, block in blocks.items():
        if not is_dense_block(block):
            raise ConfigError(f"{path!r} is not a dense block, but others in path are; rewire it separately.")
        if path not in wirings:
            raise ConfigError(f"connectivity has wirings for {shown(list(wirings))}; it also needs one for {path!r}.")
    stacks = [
        _dense_stack(block, path, fan_in, connectivity=wirings[path], seed=integer("seed", seed) + offset, **options)
        for offset, (path, block) in enumerate(blocks.items())
    ]  # all are built before the model changes, because one may raise an error
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
        raise ConfigError(f"{path!r} is a dense block, whose layers read a concatenation; leave out {what}.")
    check_dense_block(block, path)
    init = "uniform" if mask_init is None else mask_init
    stack = DenseStack(dict(block.named_children()), fan_in, mask_init=init, **options)
    stack.masks.to(conv_of(stack.flat()[1]).weight)
    for part in (stack, stack.masks, stack.flat()[0]):
        part.training = block.training  # the layers keep their modes
    return stack


def _is_layer(part: nn.Module) -> bool:
    norms = [getattr(part, name, None) for name in ("norm1", "norm2")]
    convs = [getattr(part, name, None) for name in ("conv1", "conv2")]
    return all(isinstance(norm, nn.Module) for norm in norms) and all(isinstance(conv, _ConvNd) for conv in convs)


def check_dense_block(block: nn.Module, path: str) -> None:
    """Raise an error unless the block concatenates its layers, and its layers can read any subset of channels."""
    layers = list(block.children())
    if len(layers) < 2:
        raise ConfigError(f"{path!r} has 1 layer; a dense block needs at least 2.")
    if block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks:
        raise ConfigError(f"{path!r} has hooks, which a stack in its place would not run. Remove them first.")
    for number, layer in enumerate(layers, start=1):
        _check_layer(layer, f"layer {number} of {path!r}")
    widths = widths_of(layers)
    for number, layer in enumerate(layers, start=1):
        if conv_of(layer).in_channels != sum(widths[:number]):
            raise ConfigError(
                f"layer {number} of {path!r} reads {conv_of(layer).in_channels} channels, but the input of the block "
                f"and the layers before it have {sum(widths[:number])}; its wiring cannot be learned. "
                "Leave this block out of path."
            )
    if not conv_of(layers[0]).weight.is_meta:
        with without_trace(block, probing=True):
            _check_on_input(block, layers, path)


def _check_layer(layer: nn.Module, what: str) -> None:
    norm, conv = layer.norm1, conv_of(layer)
    if not isinstance(norm, _BatchNorm):
        raise ConfigError(
            f"norm1 of {what} is a {type(norm).__name__}; it must be a batch norm, which treats every channel "
            "separately, so that some can be left out."
        )
    if conv.groups != 1 or conv.in_channels != norm.num_features:
        raise ConfigError(
            f"conv1 of {what} reads {conv.in_channels} channels in {conv.groups} groups; it must read the "
            f"{norm.num_features} channels of norm1 in 1 group."
        )


def _check_on_input(block: nn.Module, layers: Sequence[nn.Module], path: str) -> None:
    """Compare the output of the block with that of a stack of its layers."""
    weight = conv_of(layers[0]).weight
    shape = (2, weight.shape[1], *[SIDE] * (weight.dim() - 2))
    count = int(torch.Size(shape).numel())
    x = torch.linspace(0, count, count, dtype=torch.float32).sin().reshape(shape).to(weight)
    whole = DenseStack(dict(block.named_children()), connectivity="full")
    try:
        same = torch.equal(whole(x), block(x))
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the layers of {path!r} cannot read a list of features of shape {tuple(shape)}: "
            f"{str(error).splitlines()[0].rstrip('.')}. Leave this block out of path."
        ) from None
    if not same:
        raise ConfigError(
            f"{path!r} is a {type(block).__name__} that does not return the concatenation of its input and the outputs "
            "of its layers, as a dense block does; its wiring cannot be learned. Leave this block out of path."
        )
    features = list(torch.split(whole(x), list(widths_of(layers)), dim=1))
    for number, layer in enumerate(layers[1:], start=2):
        if not all(_can_leave_out_others(layer, features[:number], k) for k in (0, number - 1)):
            raise ConfigError(
                f"layer {number} of {path!r} reads its features in other ways than through norm1 and conv1, "
                "so no feature can be left out; its wiring cannot be learned. Leave this block out of path."
            )


def _can_leave_out_others(layer: nn.Module, features: list[Tensor], k: int) -> bool:
    """Return whether a layer with source k alone computes the same as with all others multiplied by 0."""
    widths = [y.shape[1] for y in features]
    mask_S = features[0].new_zeros(len(features), dtype=torch.float32)
    mask_S[k] = 1
    alone = narrowed(layer, widths, [k])([features[k]])
    masked = weighted(layer, widths, mask_S)(features)
    close = torch.finfo(alone.dtype).eps ** 0.5
    return torch.allclose(alone, masked, rtol=close, atol=close * float(masked.abs().max()))
