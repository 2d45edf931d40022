"""Convolutions and batch norms in graphs: which of them can be merged, and the merged module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from maskconnect.pruning.graphs import calls_of, is_plain

CHANNELS = -3
"""The axis of channels, with or without a batch axis."""


class Calls:
    """The modules of a network that a single node calls; merging does not add calls."""

    def __init__(self, network: fx.GraphModule) -> None:
        self.network = network
        self._once = {path for path, nodes in calls_of(network).items() if len(nodes) == 1}

    def module(self, node: fx.Node) -> Any:
        """Return the module that a node calls."""
        return self.network.get_submodule(str(node.target))

    def once(self, node: fx.Node) -> bool:
        """Return whether only this node calls its module, with its input as the only argument."""
        return node.op == "call_module" and node.target in self._once and len(node.args) == 1 and not node.kwargs

    def convolution(self, node: fx.Node) -> nn.Conv2d | None:
        """Return the dense convolution that a node calls, if no other node calls it."""
        module = self.module(node) if self.once(node) else None
        found = module is not None and is_plain(module, (nn.Conv2d,)) and module.groups == 1
        return cast(nn.Conv2d, module) if found else None


def geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    """Return everything except for the channels; convolutions with the same geometry can be merged."""
    place = conv.weight.device, conv.weight.dtype
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode, conv.bias is None, *place


def like(convs: Sequence[nn.Conv2d], weight: Tensor, bias: Tensor | None, groups: int = 1) -> nn.Conv2d:
    """Return a convolution with the geometry of these and other weights; trainable if one of these is."""
    first = convs[0]
    new = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        first.dilation,  # type: ignore[arg-type]
        groups,
        padding_mode=first.padding_mode,
        bias=bias is not None,
        device="meta",
    )
    trained = any(p.requires_grad for conv in convs for p in conv.parameters())
    new.weight = nn.Parameter(weight.detach(), trained)
    new.bias = None if bias is None else nn.Parameter(bias.detach(), trained)
    return new.train(first.training)


def biases(convs: Sequence[nn.Conv2d]) -> list[Tensor]:
    """Return the biases of convolutions: all have one, or none has."""
    return [conv.bias for conv in convs if conv.bias is not None]


def joined_norm(norms: Sequence[nn.BatchNorm2d]) -> nn.BatchNorm2d | None:
    """Return one batch norm for the channels of all; None if their options differ."""
    kinds = {(n.eps, n.momentum, n.affine, n.track_running_stats) for n in norms}
    if len(kinds) != 1:
        return None
    eps, momentum, affine, track = kinds.pop()
    first = next(iter([*norms[0].parameters(), *norms[0].buffers()]), torch.empty(0))
    joined = nn.BatchNorm2d(
        sum(n.num_features for n in norms), eps, momentum, affine, track, device=first.device, dtype=first.dtype
    )
    state = [n.state_dict() for n in norms]
    joined.load_state_dict(
        {name: torch.cat([s[name] for s in state]) if value.dim() else value for name, value in state[0].items()}
    )
    for p in joined.parameters():
        p.requires_grad_(any(own.requires_grad for n in norms for own in n.parameters()))
    return joined.train(norms[0].training)
