"""A frozen network as a plain one: graphs of torch's own operations and of the modules that stay (D10).

A stack becomes a `torch.fx.GraphModule`, whose `forward` is straight code that anybody can read: `print(network.code)`.
Modules of maskconnect's own, such as a residual block, are written out into the graphs that they are in; those of the
user stay as they are, but for nn.Sequential, of which the parts are called one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import fx, nn

from maskconnect.core.layers import LayerAggregation
from maskconnect.core.stack import MaskedStack
from maskconnect.pruning.chain import Chain
from maskconnect.pruning.dense import plain_dense
from maskconnect.pruning.graphs import graph_module, is_graph_of_ours, is_ours, is_simple_sequence, note_
from maskconnect.pruning.plan import Plan, alive_blocks
from maskconnect.retrofit.dense import DenseStack


def plain_network(model: nn.Module, plans: Mapping[str, Plan]) -> nn.Module:
    """The model with a graph in the place of every stack and of every other module of maskconnect's own.

    `plans` are those of all stacks under all their names, outer ones first. The modules of the model are not copied.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, plan in plans.items():
        stack = dict(model.named_modules(remove_duplicate=False)).get(name)
        if not isinstance(stack, MaskedStack):  # it was in a module that went, or is replaced under another name
            continue
        if stack not in made:
            made[stack] = plain_stack(stack, plan)
        if name == "":
            model = made[stack]
        else:
            model.set_submodule(name, made[stack])
    for part in model.modules():
        if hasattr(part, "make_plain_"):
            cast(Any, part).make_plain_()
    return _written_out(model, {})


def _written_out(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module with a graph in the place of everything in it that is maskconnect's own."""
    if module not in made:
        made[module] = module
        if is_ours(module):
            made[module] = graph = graph_module(module, _Tracer().trace(module))
            if hasattr(module, "describe"):
                note_(graph, architecture=cast(Any, module).describe())
        for name, child in module._modules.items():
            if child is not None and not is_ours(module):
                module._modules[name] = _written_out(child, made)
    return made[module]


def plain_stack(stack: MaskedStack, plan: Plan) -> nn.Module:
    """What stays of a stack, under the names that it had."""
    if isinstance(stack, DenseStack):
        return plain_dense(stack)
    return PlainLayers(stack) if isinstance(stack.aggregation, LayerAggregation) else Chain(stack, plan).module()


class PlainLayers(nn.Module):
    """What stays of layers whose inputs a LayerAggregation makes together; it is written out before anybody sees it."""

    def __init__(self, stack: MaskedStack) -> None:
        super().__init__()
        self.train(stack.training)
        self.blocks, self.aggregation = alive_blocks(stack), cast(LayerAggregation, stack.aggregation)
        masks, layers = stack.masks.settled(), stack.layout.layers
        reads = [[masks.sources[j] for j in members if masks.alive[j]] for members in layers[1:]]
        self.rows = [  # of each layer, who reads it; the output reads all of the last
            [tuple(k - members.start for k in row) for row in rows]
            for members, rows in zip(layers, [*reads, [tuple(layers[-1])]], strict=True)
        ]

    def forward(self, x: Any) -> Any:
        """Run layer after layer."""
        layers = [cast(nn.ModuleDict, layer) for layer in self.blocks.values()]
        inputs = [x] * len(layers[0])
        for number, (layer, rows) in enumerate(zip(layers, self.rows, strict=True)):
            outputs = {int(name): branch(read) for (name, branch), read in zip(layer.items(), inputs, strict=True)}
            distinct = list(dict.fromkeys(rows))
            made = dict(zip(distinct, self.aggregation.plain(number, outputs, distinct), strict=True))
            inputs = [made[row] for row in rows]
        return inputs[0]


class _Tracer(fx.Tracer):
    """Goes into maskconnect's modules, nn.Sequential and graphs, and into nothing else."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called as it is."""
        return not (is_ours(m) or is_simple_sequence(m) or is_graph_of_ours(m))
