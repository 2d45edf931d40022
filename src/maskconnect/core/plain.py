"""A frozen network as a plain one: graphs of torch's own operations and of the modules that stay (D10).

A stack becomes a `torch.fx.GraphModule`, whose `forward` is straight code that anybody can read: `print(network.code)`.
Modules of maskconnect's own, such as a residual block, are written out into the graphs that they are in; those of the
user stay as they are, but for nn.Sequential, of which the parts are called one after the other.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maskconnect.core.fold import CONVOLUTIONS, NORMS, is_plain
from maskconnect.core.inputs import cloned
from maskconnect.core.layerwise import LayerAggregation
from maskconnect.core.plan import Axes, Plan, Subsample, Wanted
from maskconnect.core.stack import MaskedStack

NEVER_IN_PLACE = (nn.Linear, *CONVOLUTIONS, *NORMS, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither change what they read nor return it."""


def plain_stack(stack: MaskedStack, plan: Plan) -> nn.Module:
    """What stays of a stack, under the names that it had."""
    if isinstance(stack.aggregation, LayerAggregation):
        return PlainLayers(stack)
    return _Chain(stack, plan).module()


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
            made[module] = graph = _module(module, _Tracer().trace(module))
            if hasattr(module, "describe"):
                graph.meta["maskconnect"] = {"architecture": cast(Any, module).describe()}
        for name, child in module._modules.items():
            if child is not None and not is_ours(module):
                module._modules[name] = _written_out(child, made)
    return made[module]


def is_ours(module: nn.Module) -> bool:
    """Whether the class of a module is maskconnect's."""
    return type(module).__module__.partition(".")[0] == "maskconnect"


class _Chain:
    """The graph of a chain, or of layers whose branches each read for themselves."""

    def __init__(self, stack: MaskedStack, plan: Plan) -> None:
        self.stack, self.plan, self.places = stack, plan, stack.layout.places
        self.root = nn.Module().train(stack.training)
        self.root.blocks = alive_blocks(stack)
        if isinstance(stack.aggregation, nn.Module):
            self.root.aggregation = stack.aggregation
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.arguments = [self._placeholder(name) for name in plan.arguments]

    def module(self) -> fx.GraphModule:
        """The whole of it."""
        found: dict[int, fx.Node] = {}
        last = self.x
        for place, step in enumerate(self.plan.steps):
            sources = [found[number] for number in step.reads]
            if step.how is not None:
                last = self._aligned(sources, step.how)
            else:
                last = self._aggregate(sources) if sources else self.x
                if step.number < len(self.places):
                    layer, branch = self.places[step.number]
                    path = f"blocks.{layer}.{branch}" if self.stack.layout.layered else f"blocks.{layer}"
                    module = self.root.get_submodule(path)
                    if self._passes_on(sources) and self._is_read_after(place) and not _never_in_place(module):
                        last = self._copied(last)
                    last = self._call(module, path, last)
            found[step.number] = last
        self.graph.output(last)
        return _module(self.root, self.graph)

    def _placeholder(self, name: str | int) -> tuple[str | int, fx.Node]:
        """A further argument, which has the name and the default that the first module has for it."""
        with_names = _parameters(self.stack.flat()[0])
        known = with_names[name] if isinstance(name, int) and name < len(with_names) else None
        known = next((p for p in with_names if p.name == name), known)
        text = known.name if known is not None else f"argument{name}" if isinstance(name, int) else name
        default = known.default if known is not None else inspect.Parameter.empty
        plain = default is None or isinstance(default, bool | int | float | str)
        return name, self.graph.placeholder(text, default_value=default if plain else inspect.Parameter.empty)

    def _call(self, module: nn.Module, path: str, x: fx.Node) -> fx.Node:
        if is_simple_sequence(module) and not self.arguments:
            for name, part in module._modules.items():  # also a part that is there twice
                assert part is not None
                x = self._call(part, f"{path}.{name}", x)
            return x
        args = [node for name, node in self.arguments if isinstance(name, int)]
        kwargs: dict[str, Any] = {name: node for name, node in self.arguments if isinstance(name, str)}
        return self.graph.call_module(path, (x, *args), kwargs)

    def _passes_on(self, sources: Sequence[fx.Node]) -> bool:
        """Whether the aggregate may be one of the sources itself."""
        return len(sources) < 2 or callable(self.stack.aggregation)

    def _is_read_after(self, place: int) -> bool:
        """Whether a later step reads something that the step at `place` reads, which modules may change in place."""
        base = {step.number: step.reads[0] for step in self.plan.steps if step.how is not None}
        here, *later = (
            {base.get(k, k) for k in (step.reads or (-1,))} for step in self.plan.steps[place:] if step.how is None
        )
        return any(here & other for other in later)

    def _copied(self, x: fx.Node) -> fx.Node:
        return self.graph.call_method("clone", (x,)) if self.plan.tensors else self.graph.call_function(cloned, (x,))

    def _aggregate(self, sources: list[fx.Node]) -> fx.Node:
        """One source as it is; the sum or the mean of several; or what the user's own aggregation makes of any."""
        aggregation = self.stack.aggregation
        if callable(aggregation):
            dtype = self.stack.masks.real.dtype
            if self.plan.tensors:
                ones = self.graph.call_method("new_ones", (sources[0], len(sources)), {"dtype": dtype})
            else:
                ones = self.graph.call_function(ones_for, (sources, dtype))
            if isinstance(aggregation, nn.Module):
                return self.graph.call_module("aggregation", (sources, ones))
            return self.graph.call_function(_function(aggregation), (sources, ones))
        first, *others = sources
        if not others:
            return first
        x = self.graph.call_method("float", (first,)) if self.plan.half else first
        for y in others:
            x = self.graph.call_function(operator.add, (x, y))
        if aggregation == "mean":
            x = self.graph.call_function(operator.truediv, (x, len(sources)))
        return self.graph.call_method("half", (x,)) if self.plan.half else x

    def _aligned(self, sources: Sequence[fx.Node], how: Subsample | Wanted) -> fx.Node:
        y = sources[0]
        self._check(y, how.unseen)
        if isinstance(how, Subsample):
            if any(stride > 1 for stride in how.strides):
                places = (slice(None), slice(None), *(slice(None, None, stride) for stride in how.strides))
                y = self.graph.call_function(operator.getitem, (y, places))
            padding = [0, 0] * len(how.strides) + [0, how.zeros]
            return self.graph.call_function(F.pad, (y, padding)) if how.zeros else y
        assert self.stack.align is not None
        shape = self.graph.call_function(getattr, (sources[-1], "shape")) if how.like is not None else None
        shape = shape or self.graph.call_function(torch.Size, (list(self._lengths(y, how)),))
        return self.graph.call_function(_function(self.stack.align), (y, shape))

    def _lengths(self, y: fx.Node, how: Wanted) -> Iterator[fx.Node | int]:
        """n * up / down, rounded up, of every axis."""
        for axis, (up, down) in enumerate(how.scale):
            if axis >= how.rank:
                yield up
                continue
            length = self.graph.call_method("size", (y, axis))
            if (up, down) != (1, 1):
                length = self.graph.call_function(operator.mul, (length, -up))
                length = self.graph.call_function(operator.floordiv, (length, down))
                length = self.graph.call_function(operator.neg, (length,))
            yield length

    def _check(self, y: fx.Node, unseen: Axes) -> None:
        """Rather an error than a guess."""
        for axis, length in unseen:
            found = self.graph.call_method("size", (y, axis))
            same = self.graph.call_function(operator.eq, (found, length))
            text = (
                f"axis {axis} of an output had length {length} when the network was pruned, which did not show how it "
                "is aligned at other lengths. Prune with an example of this size."
            )
            self.graph.call_function(torch._assert, (same, text))


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
        return not (is_ours(m) or is_simple_sequence(m) or isinstance(m, fx.GraphModule))


def _module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The graph with those modules of `root` that it calls, in the modes that they are in."""
    for node in graph.nodes:
        node.type = None  # a string, which cannot be pickled
        if node.op == "call_module" and type(root.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    made = fx.GraphModule(root, graph, class_name="Pruned")
    modes = {name: part.training for name, part in root.named_modules(remove_duplicate=False)}
    for name, part in made.named_modules():
        part.training = modes[name]
    return made


def alive_blocks(stack: MaskedStack) -> nn.ModuleDict:
    """The modules that stay, under the numbers that they had."""
    alive = iter(stack.masks.settled().alive)

    def kept(modules: nn.ModuleList, inside: bool) -> nn.ModuleDict:
        found = nn.ModuleDict().train(stack.training)
        for number, module in enumerate(modules):
            if inside:
                found[str(number)] = kept(cast(nn.ModuleList, module), False)
            elif next(alive):
                found[str(number)] = module
        return found

    return kept(stack.blocks, stack.layout.layered)


def is_simple_sequence(module: nn.Module) -> bool:
    """Whether a module does nothing but to call its parts one after the other."""
    return is_plain(module, (nn.Sequential,)) and len(cast(nn.Sequential, module)) > 0


def _never_in_place(module: nn.Module) -> bool:
    if is_simple_sequence(module):
        return _never_in_place(cast(nn.Sequential, module)[0])
    return is_ours(module) or is_plain(module, NEVER_IN_PLACE)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of a module that have names, the input first."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(module.forward).parameters.values() if p.kind in named]


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function with a name, which graphs need."""
    if hasattr(call, "__name__"):
        return call

    def called(*args: Any) -> Any:
        return call(*args)

    return called


def ones_for(sources: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A mask of ones for sources that are not all tensors."""
    like = next((leaf for leaf in tree_leaves(sources) if isinstance(leaf, Tensor)), torch.empty(0))
    return torch.ones(len(sources), dtype=dtype, device=like.device)
