"""Sums in a graph: find their terms, and compute common parts once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from maskconnect.pruning.graphs import ACTIVATIONS, NEVER_IN_PLACE, is_plain

Term = tuple[fx.Node, float]
"""A node and its factor."""


def operands(node: fx.Node) -> tuple[Term, Term] | None:
    """Return the two terms of an addition; None for other nodes."""
    if node.op != "call_function" or node.target not in (operator.add, torch.add) or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    alpha = node.kwargs.get("alpha", 1.0)
    assert isinstance(alpha, int | float)
    return (a, 1.0), (b, float(alpha))


def terms_of(node: fx.Node) -> list[Term]:
    """Return all terms of a sum, including those of inner sums that nothing else reads."""
    parts = operands(node)
    assert parts is not None
    found: list[Term] = []
    for part, factor in parts:
        inner = operands(part) is not None and len(part.users) == 1 and factor == 1
        found += terms_of(part) if inner else [(part, factor)]
    return found


def sums_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the sums that are not only a part of another sum."""
    return [
        node
        for node in graph.nodes
        if operands(node) is not None and not (len(node.users) == 1 and any(_takes(user, node) for user in node.users))
    ]


def _takes(user: fx.Node, node: fx.Node) -> bool:
    parts = operands(user)
    return parts is not None and (node, 1.0) in parts


def write(graph: fx.Graph, terms: Iterable[Term]) -> fx.Node:
    """Add terms one by one, at the insertion point of the graph."""
    (x, factor), *others = sorted(terms, key=lambda term: term[1] != 1)
    assert factor == 1, "a sum starts with a term of factor 1"
    for y, factor in others:
        if factor == 1:
            x = graph.call_function(operator.add, (x, y))
        else:
            x = graph.call_function(torch.add, (x, y), {"alpha": factor})
    return x


def replace(graph: fx.Graph, old: fx.Node, terms: Sequence[Term]) -> fx.Node:
    """Replace a sum by the sum of `terms`."""
    with graph.inserting_before(old):
        new = write(graph, terms)
    old.replace_all_uses_with(new)
    return new


def pad_once_(network: fx.GraphModule) -> None:
    """Add terms that are subsampled and padded in the same way before padding, not after it."""
    graph = network.graph
    for root in sums_of(graph):
        alike: dict[Any, list[fx.Node]] = {}
        terms = before = terms_of(root)
        for node, factor in terms:
            if factor == 1 and node.op == "call_function" and node.target is F.pad:
                view = node.args[0]
                how = view.args[1:] if isinstance(view, fx.Node) and view.target is operator.getitem else ()
                alike.setdefault(repr((node.args[1:], node.kwargs, how)), []).append(node)
        for nodes in alike.values():
            if len(nodes) > 1:
                with graph.inserting_before(root):
                    inner = write(graph, [(cast(fx.Node, node.args[0]), 1.0) for node in nodes])
                    padded = graph.call_function(F.pad, (inner, *nodes[0].args[1:]), nodes[0].kwargs)
                terms = [(padded, 1.0), *((node, factor) for node, factor in terms if node not in nodes)]
        if terms != before:
            replace(graph, root, terms)
    graph.eliminate_dead_code()


def share_(network: fx.GraphModule) -> None:
    """Compute common parts of sums once: the most common pair first, then the most common of the rest."""
    graph = network.graph
    roots = sums_of(graph)
    before = [terms_of(root) for root in roots]
    sums = [list(terms) for terms in before]
    place = {node: number for number, node in enumerate(graph.nodes)}
    last = dict(enumerate(graph.nodes))  # the last node written at each place
    pairs = Counter(pair for terms in sums for pair in _pairs(terms, place))
    while pairs and pairs[best := max(pairs, key=pairs.__getitem__)] > 1:
        where = max(place[node] for node in best)
        with graph.inserting_after(last[where]):
            new = last[where] = graph.call_function(operator.add, best)
        place[new] = where
        for terms in sums:
            if all((node, 1.0) in terms for node in best):
                pairs.subtract(_pairs(terms, place))
                for node in best:
                    terms.remove((node, 1.0))
                terms.append((new, 1.0))
                pairs.update(_pairs(terms, place))
    for root, old, terms in zip(roots, before, sums, strict=True):
        if terms != old:
            replace(graph, root, terms)
    graph.eliminate_dead_code()
    _protect_(network)


def _protect_(network: fx.GraphModule) -> None:
    """Copy a sum for a module that may change its input in place, if other nodes also read the sum."""
    for node in network.graph.nodes:
        if node.op != "call_module":
            continue
        module = network.get_submodule(str(node.target))
        careful = is_plain(module, ACTIVATIONS) and not getattr(module, "inplace", False)
        if careful or is_plain(module, NEVER_IN_PLACE):
            continue
        for x in node.all_input_nodes:
            if operands(x) is not None and len(x.users) > 1:
                with network.graph.inserting_before(node):
                    node.replace_input_with(x, network.graph.call_method("clone", (x,)))


def _pairs(terms: Sequence[Term], place: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Return all pairs of terms with factor 1, in the order of the graph."""
    simple = {node for node, factor in terms if factor == 1}
    return combinations(sorted(simple, key=lambda node: (place[node], node.name)), 2)
