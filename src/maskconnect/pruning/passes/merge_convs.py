"""Merge convolutions that have the same input, and convolutions whose outputs are summed (section 3.5).

    same input         W_1 x, ..., W_n x           one convolution with all outputs
    after those        V_1 y_1, ..., V_n y_n       one grouped convolution
    summed outputs     U_1 z_1 + ... + U_n z_n     one convolution that reads all inputs

With K=C the result is ResNeXt as published, with dense and grouped convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from maskconnect.pruning.passes.convolutions import CHANNELS, Calls, biases, geometry, like
from maskconnect.pruning.passes.share_sums import replace, sums_of, terms_of
from maskconnect.pruning.passes.siblings import Siblings, follows, join_neighbors


def merge_(network: fx.GraphModule) -> None:
    """Merge all convolutions that can be merged."""
    calls = Calls(network)
    for root in sums_of(network.graph):
        _merge_sum(calls, root)
    readers: dict[Any, list[fx.Node]] = {}
    for node in network.graph.nodes:
        conv = calls.convolution(node)
        if conv is not None:
            readers.setdefault((node.args[0], *geometry(conv), follows(calls, node)), []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            Siblings(calls, nodes).merge()
    join_neighbors(network)


def _merge_sum(calls: Calls, root: fx.Node) -> None:
    """Merge the convolutions of a sum that nothing else reads into one that reads all their inputs."""
    network = calls.network
    terms = before = terms_of(root)
    alike: dict[Any, list[fx.Node]] = {}
    for node, factor in terms:
        conv = calls.convolution(node)
        # With a stride, inputs of different sizes may have outputs of the same size.
        if conv is not None and factor == 1 and len(node.users) == 1 and set(conv.stride) == {1}:
            alike.setdefault((conv.out_channels, *geometry(conv)), []).append(node)
    for nodes in alike.values():
        if len(nodes) < 2:
            continue
        convs: list[nn.Conv2d] = [calls.module(node) for node in nodes]
        found = biases(convs)
        weight = torch.cat([conv.weight.detach() for conv in convs], dim=1)
        merged = like(convs, weight, torch.stack(found).sum(0) if found else None)
        network.set_submodule(str(nodes[0].target), merged)
        with network.graph.inserting_before(root):
            together = network.graph.call_function(torch.cat, ([node.args[0] for node in nodes],), {"dim": CHANNELS})
            new = network.graph.call_module(str(nodes[0].target), (together,))
        terms = [(new, 1.0), *((node, factor) for node, factor in terms if node not in nodes)]
    if terms != before:
        replace(network.graph, root, terms)
        network.graph.eliminate_dead_code()
