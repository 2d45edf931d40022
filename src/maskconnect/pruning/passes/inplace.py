"""Write results over tensors that nothing else reads, which saves memory and allocation time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from maskconnect.pruning.graphs import ACTIVATIONS, CONVOLUTIONS, NORMS, is_plain
from maskconnect.pruning.passes.share_sums import operands

NEW_TENSOR_OPS = (operator.add, torch.add, operator.iadd, operator.truediv, operator.itruediv, F.pad, "add_")
"""Operations that return a new tensor, or write over one, and do not need it in the backward pass."""

SAME_DTYPE_OPS = (*NEW_TENSOR_OPS, F.relu, operator.getitem, torch.narrow, torch.cat, "clone")
"""Operations whose results have the precision of their inputs."""


def write_over_(network: fx.GraphModule) -> None:
    """Write sums, quotients and activations over a new tensor that nothing else reads."""
    alike = _of_one_precision(network)
    for node in network.graph.nodes:
        if node.target not in IN_PLACE or not alike.issuperset(node.all_input_nodes):
            continue
        parts = operands(node)
        if parts is not None and not _is_free(network, parts[0][0]) and parts[1][1] == 1:
            node.args = (parts[1][0], parts[0][0])
        if _is_free(network, node.args[0]):
            IN_PLACE[node.target](node)


def _of_one_precision(network: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that depend on convolutions only, and so have one precision even under autocast."""
    found: set[fx.Node] = set()
    for node in network.graph.nodes:
        inside = bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if node.op == "call_module":
            module = network.get_submodule(str(node.target))
            known = is_plain(module, CONVOLUTIONS) or (inside and is_plain(module, (*NORMS, *ACTIVATIONS)))
        else:
            known = inside and node.target in SAME_DTYPE_OPS
        if known:
            found.add(node)
    return found


def _is_free(network: fx.GraphModule, node: Any) -> bool:
    """Return whether a tensor is new, and read only here."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.op == "call_module":
        return is_plain(network.get_submodule(str(node.target)), (*CONVOLUTIONS, *NORMS))
    return node.target in NEW_TENSOR_OPS


def _to(function: Callable[..., Any], **options: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target = function
        node.kwargs = {**node.kwargs, **options}

    return change


def _add(node: fx.Node) -> None:
    if node.kwargs:
        node.op, node.target = "call_method", "add_"
    else:
        node.target = operator.iadd


IN_PLACE: dict[Any, Callable[[fx.Node], None]] = {
    operator.add: _add,
    torch.add: _add,
    operator.truediv: _to(operator.itruediv),
    F.relu: _to(F.relu, inplace=True),
}
