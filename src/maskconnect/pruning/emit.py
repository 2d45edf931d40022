"""Write a frozen network as a plain one: graphs of torch operations and of the modules that stay (D10).

A stack becomes a `torch.fx.GraphModule`, whose `forward` is readable straight-line code: `print(network.code)`. Modules
of maskconnect, such as residual blocks, are inlined into these graphs. Modules of the user stay the same, except for
nn.Sequential, whose parts are called one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import fx, nn

from maskconnect.core.layers import LayerAggregation
from maskconnect.core.stack import MaskedStack
from maskconnect.pruning.chain import Chain
from maskconnect.pruning.dense import plain_dense
from maskconnect.pruning.graphs import graph_module, is_own_module, is_pruned_graph, is_simple_sequence, note_
from maskconnect.pruning.plan import Plan, alive_blocks
from maskconnect.retrofit.dense import DenseStack


def plain_network(model: nn.Module, plans: Mapping[str, Plan]) -> nn.Module:
    """Replace every stack, and every other module of maskconnect, by a graph.

    `plans` are the plans of all stacks under all their names, outer stacks first. The modules of the model are not
    copied.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, plan in plans.items():
        stack = dict(model.named_modules(remove_duplicate=False)).get(name)
        if not isinstance(stack, MaskedStack):  # it was inside a removed module, or is replaced under another name
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
    return _with_graphs(model, {})


def _with_graphs(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace every module of maskconnect inside a module by a graph."""
    if module not in made:
        made[module] = module
        if is_own_module(module):
            made[module] = graph = graph_module(module, _Tracer().trace(module))
            if hasattr(module, "describe"):
                note_(graph, architecture=cast(Any, module).describe())
        for name, child in module._modules.items():
            if child is not None and not is_own_module(module):
                module._modules[name] = _with_graphs(child, made)
    return made[module]


def plain_stack(stack: MaskedStack, plan: Plan) -> nn.Module:
    """Return what stays of a stack, under the same names."""
    if isinstance(stack, DenseStack):
        return plain_dense(stack)
    return PlainLayers(stack) if isinstance(stack.aggregation, LayerAggregation) else Chain(stack, plan).module()


class PlainLayers(nn.Module):
    """The remainder of layers whose inputs a LayerAggregation computes together; it is traced into a graph later."""

    def __init__(self, stack: MaskedStack) -> None:
        super().__init__()
        self.train(stack.training)
        self.blocks, self.aggregation = alive_blocks(stack), cast(LayerAggregation, stack.aggregation)
        masks, layers = stack.masks.current_wiring(), stack.layout.layers
        reads = [[masks.sources[j] for j in members if masks.alive[j]] for members in layers[1:]]
        self.rows = [  # for each layer, the sources of its readers; the output reads all of the last layer
            [tuple(k - members.start for k in row) for row in rows]
            for members, rows in zip(layers, [*reads, [tuple(layers[-1])]], strict=True)
        ]

    def forward(self, x: Any) -> Any:
        """Run the layers in order."""
        layers = [cast(nn.ModuleDict, layer) for layer in self.blocks.values()]
        inputs = [x] * len(layers[0])
        for number, (layer, rows) in enumerate(zip(layers, self.rows, strict=True)):
            outputs = {int(name): branch(read) for (name, branch), read in zip(layer.items(), inputs, strict=True)}
            distinct = list(dict.fromkeys(rows))
            made = dict(zip(distinct, self.aggregation.plain(number, outputs, distinct), strict=True))
            inputs = [made[row] for row in rows]
        return inputs[0]


class _Tracer(fx.Tracer):
    """Traces through modules of maskconnect, nn.Sequential and graphs, and through nothing else."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called instead of traced."""
        return not (is_own_module(m) or is_simple_sequence(m) or is_pruned_graph(m))
