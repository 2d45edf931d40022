"""Find out from the autograd graph whether one tensor was computed from another."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def comes_from(x: Any, y: Any) -> bool:
    """Return whether x contains a tensor that is in y, or was computed from a tensor in y."""
    ends, starts = ([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)] for given in (x, y))
    if any(a is b for a in ends for b in starts):
        return True
    wanted = {leaf.grad_fn for leaf in starts if leaf.grad_fn is not None}
    nodes = [leaf.grad_fn for leaf in ends if leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes and not wanted & seen:
        following = {node for node, _ in nodes.pop().next_functions if node is not None} - seen
        seen |= following
        nodes.extend(following)
    return bool(wanted & seen)
