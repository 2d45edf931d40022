"""The graph of a chain, or of layers whose branches each read for themselves, as its plan says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maskconnect.core.graphs import CONVOLUTIONS, NORMS, graph_module, is_ours, is_plain, is_simple_sequence
from maskconnect.core.inputs import cloned
from maskconnect.core.plan import Axes, Plan, Subsample, Wanted, alive_blocks
from maskconnect.core.stack import MaskedStack

NEVER_IN_PLACE = (nn.Linear, *CONVOLUTIONS, *NORMS, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither change what they read nor return it."""


class Chain:
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
        return graph_module(self.root, self.graph)

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
