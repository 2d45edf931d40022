"""Fold batch norms into the convolutions before them, for inference."""

from __future__ import annotations

from typing import cast

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from maskconnect.pruning.graphs import CONVOLUTIONS, NORMS, calls_of, is_plain


def fold_(network: fx.GraphModule) -> None:
    """Fold every batch norm that reads a single convolution, if nothing else reads this convolution."""
    calls = calls_of(network)
    for path, nodes in calls.items():
        layer = network.get_submodule(path)
        users = [user for node in nodes for user in node.users]
        paths = {user.target if user.op == "call_module" else None for user in users}
        if not is_plain(layer, CONVOLUTIONS) or len(paths) != 1 or len(users) != len(nodes):
            continue
        (norm_path,) = paths
        if norm_path is None or calls[str(norm_path)] != users:
            continue
        norm = network.get_submodule(str(norm_path))
        if not is_plain(norm, NORMS) or not norm.track_running_stats:
            continue
        network.set_submodule(path, _fused(layer, norm))
        for node, user in zip(nodes, users, strict=True):
            user.replace_all_uses_with(node)
            network.graph.erase_node(user)


def _fused(conv: nn.Module, norm: nn.Module) -> nn.Module:
    training = conv.training
    fused = fuse_conv_bn_eval(cast(nn.Conv2d, conv.eval()), cast(nn.BatchNorm2d, norm.eval()))
    for p in fused.parameters():
        p.requires_grad_(next(conv.parameters()).requires_grad)
    return fused.train(training)
