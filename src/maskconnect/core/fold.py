"""Batch norms folded into the convolutions (or linear layers) before them, for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_(network: fx.GraphModule) -> None:
    """Fold every batch norm that only ever reads one convolution which nothing else reads."""
    calls = calls_of(network)
    for path, nodes in calls.items():
        layer = network.get_submodule(path)
        users = [user for node in nodes for user in node.users]
        paths = {user.target if user.op == "call_module" else None for user in users}
        if not is_plain(layer, (*CONVOLUTIONS, nn.Linear)) or len(paths) != 1 or len(users) != len(nodes):
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


def calls_of(network: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Where each module is called, in order."""
    calls: dict[str, list[fx.Node]] = {}
    for node in network.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return calls


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of these kinds exactly, and nobody looks at or changes what it does."""
    return type(module) in kinds and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _fused(layer: nn.Module, norm: nn.Module) -> nn.Module:
    training, fuse = layer.training, _fusion(layer)
    fused = fuse(layer.eval(), norm.eval())
    for p in fused.parameters():
        p.requires_grad_(next(layer.parameters()).requires_grad)
    return fused.train(training)


def _fusion(layer: nn.Module) -> Callable[[Any, Any], nn.Module]:
    return fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
