"""A frozen dense block as a graph, in which layers have no weights for channels that they do not read."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from maskconnect.pruning.graphs import graph_module
from maskconnect.retrofit.dense import DenseStack
from maskconnect.retrofit.narrow import twin


def plain_dense(stack: DenseStack) -> fx.GraphModule:
    """Return the graph of a dense block; its layers keep their names and classes."""
    root, graph = nn.Module().train(stack.training), fx.Graph()
    features = [graph.placeholder("x")]
    _, *sources = stack.masks.current_wiring().sources
    for number, (name, reads) in enumerate(zip(stack.names[1:], sources, strict=True), start=1):
        root.add_module(name, _independent(stack.pruned_layer(number), stack.flat()[number]))
        features.append(graph.call_module(name, ([features[k] for k in reads],)))
    graph.output(graph.call_function(torch.cat, (features,), {"dim": 1}))
    return graph_module(root, graph)


def _independent(small: nn.Module, layer: nn.Module) -> nn.Module:
    """Return a narrowed layer with its own parameters instead of parts of the original ones."""
    changed: dict[str, nn.Module | None] = {}
    for name in ("norm1", "conv1"):
        part, whole = small.get_submodule(name), layer.get_submodule(name)
        pairs = ((key, y, whole._parameters[key]) for key, y in part._parameters.items())
        changed[name] = twin(part, parameters={key: _parameter(y, like) for key, y, like in pairs})
    return twin(small, modules={**small._modules, **changed})


def _parameter(y: Tensor | None, like: nn.Parameter | None) -> nn.Parameter | None:
    if y is None or like is None:
        return None
    return nn.Parameter(y.detach().clone(), requires_grad=like.requires_grad)
