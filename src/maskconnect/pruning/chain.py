"""Build the graph of a chain, or of layers whose inputs are computed per branch, from its plan."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maskconnect.core.aggregate import divisor_of
from maskconnect.core.residual import Residual
from maskconnect.core.stack import MaskedStack
from maskconnect.core.targets import active_places, cloned
from maskconnect.pruning.graphs import NEVER_IN_PLACE, graph_module, is_own_module, is_plain, is_simple_sequence
from maskconnect.pruning.plan import Axes, Plan, Step, Subsample, Wanted, alive_blocks, is_argument

EMPTY = inspect.Parameter.empty


Value = fx.Node | tuple[fx.Node, fx.Node]
"""The output of a module: a tensor, or a residual and a shortcut."""


class Chain:
    """Builds the graph of a chain, or of layers whose inputs are computed per branch."""

    def __init__(self, stack: MaskedStack, plan: Plan) -> None:
        self.stack, self.plan, self.places = stack, plan, stack.layout.places
        self.pairs = stack.aggregation == "residual"
        self.joined: dict[tuple[Value, int], fx.Node] = {}
        self.root = nn.Module().train(stack.training)
        self.root.blocks = alive_blocks(stack)
        if isinstance(stack.aggregation, nn.Module):
            self.root.aggregation = stack.aggregation
        if isinstance(stack.align, nn.Module):
            self.root.align = stack.align
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.arguments = self._placeholders()

    def module(self) -> fx.GraphModule:
        """Return the whole graph."""
        found: dict[int, Value] = {}
        last: Value = self.x
        for step in self.plan.steps:
            sources = [found[number] for number in step.reads]
            if step.how is not None:
                last = self._all_aligned(sources, step.how)
            else:
                last = self._aggregate(sources, step.number) if sources else self.x
                if step.number < len(self.places):
                    layer, branch = self.places[step.number]
                    path = f"blocks.{layer}.{branch}" if self.stack.layout.layered else f"blocks.{layer}"
                    module = self.root.get_submodule(path)
                    if self._passes_on(sources) and self._is_read_elsewhere(step) and not _never_in_place(module):
                        last = self._copied(last)
                    last = self._pair(module, path, last) if self.pairs else self._call(module, path, last)
            found[step.number] = last
        self.graph.output(last if isinstance(last, fx.Node) else self._activated(self._joined(last, 1)))
        return graph_module(self.root, self.graph)

    def _placeholders(self) -> list[tuple[str | int, fx.Node]]:
        """Add the further arguments, named as in the first module, with the defaults that all modules agree on."""
        steps = [step.number for step in self.plan.steps if step.number < len(self.places)]
        signatures = [_parameters(self.stack.flat()[number]) for number in steps]
        found: list[tuple[str | int, str, Any]] = []
        for name in self.plan.arguments:
            assert is_argument(name), "names become code"
            known = [_find(signature, name) for signature in signatures]
            defaults = {p.default if p is not None and _is_simple(p.default) else EMPTY for p in known}
            text = name if isinstance(name, str) else known[0].name if known[0] is not None else f"argument{name}"
            found.append((name, text, defaults.pop() if len(defaults) == 1 else EMPTY))
        last = max((place for place, (_, _, default) in enumerate(found) if default is EMPTY), default=-1)
        return [
            (name, self.graph.placeholder(text, default_value=default if place > last else EMPTY))
            for place, (name, text, default) in enumerate(found)
        ]

    def _call(self, module: nn.Module, path: str, x: fx.Node) -> fx.Node:
        if is_simple_sequence(module) and not self.arguments:
            for name, part in module._modules.items():  # including parts that occur twice
                assert part is not None
                x = self._call(part, f"{path}.{name}", x)
            return x
        args = [node for name, node in self.arguments if isinstance(name, int)]
        kwargs: dict[str, Any] = {name: node for name, node in self.arguments if isinstance(name, str)}
        return self.graph.call_module(path, (x, *args), kwargs)

    def _pair(self, module: nn.Module, path: str, x: fx.Node) -> Value:
        """Return the residual and the shortcut of a module."""
        if _is_residual(module):
            residual = self._call(module.residual, f"{path}.residual", x)
            return residual, self.graph.call_module(f"{path}.shortcut", (x,))
        pair = self._call(module, path, x)
        first, second = (self.graph.call_function(operator.getitem, (pair, place)) for place in range(2))
        return first, second

    def _joined(self, pair: Value, fan_in: int) -> fx.Node:
        """Return a residual plus its part of the shortcut; readers with the same fan-in share it."""
        if isinstance(pair, fx.Node):
            return pair
        if (pair, fan_in) not in self.joined:
            share: dict[str, Any] = {} if fan_in == 1 else {"alpha": 1 / fan_in}
            self.joined[pair, fan_in] = self.graph.call_function(torch.add if share else operator.add, pair, share)
        return self.joined[pair, fan_in]

    def _activated(self, x: fx.Node) -> fx.Node:
        """Add the ReLU that follows a join of residual blocks."""
        return self.graph.call_function(F.relu, (x,)) if self.pairs else x

    def _passes_on(self, sources: Sequence[Value]) -> bool:
        """Return whether the aggregate may be one of the sources itself."""
        return callable(self.stack.aggregation) or not sources or (len(sources) == 1 and not self.pairs)

    def _is_read_elsewhere(self, step: Step) -> bool:
        """Return whether another step reads a source of this one, which a module may change in place."""
        base = {each.number: each.reads[0] for each in self.plan.steps if each.how is not None}

        def sources(each: Step) -> set[int]:
            return {base.get(k, k) for k in each.reads or (-1,)}

        others = [each for each in self.plan.steps if each.how is None and each is not step]
        return any(sources(step) & sources(other) for other in others)

    def _copied(self, x: fx.Node) -> fx.Node:
        return self.graph.call_method("clone", (x,)) if self.plan.tensors else self.graph.call_function(cloned, (x,))

    def _scaled(self, sources: list[fx.Node], target: int) -> fx.Node:
        """Return the sum of sources, each times its scale."""
        stack, name = self.stack, f"scales{target}"
        assert stack.scales is not None
        places = active_places(stack.masks.candidates[target], stack.masks.current_wiring().sources[target])
        row = stack.scales.detach()[target - stack.layout.targets.start, places]
        self.root.register_parameter(name, nn.Parameter(row.clone()))
        scales = self.graph.get_attr(name)
        factors = [self.graph.call_function(operator.getitem, (scales, place)) for place in range(len(sources))]
        scaled = [self.graph.call_function(operator.mul, pair) for pair in zip(sources, factors, strict=True)]
        x = scaled[0]
        for y in scaled[1:]:
            x = self.graph.call_function(operator.add, (x, y))
        return x

    def _aggregate(self, values: Sequence[Value], target: int) -> fx.Node:
        """Return the aggregate of sources: a single source, a divided sum, or a call of the aggregation of the user."""
        aggregation, sources = self.stack.aggregation, [self._joined(value, len(values)) for value in values]
        if callable(aggregation):
            kind = self.stack.masks.real.dtype
            if self.plan.tensors:
                ones = self.graph.call_method("new_ones", (sources[0], len(sources)), {"dtype": kind})
            else:
                ones = self.graph.call_function(ones_for, (sources, kind))
            if isinstance(aggregation, nn.Module):
                return self.graph.call_module("aggregation", (sources, ones))
            return self.graph.call_function(_function(aggregation), (sources, ones))
        if aggregation == "scaled" and target < len(self.places):
            return self._scaled(sources, target)
        first, *others = sources
        if not others:
            return self._activated(first)
        x, dtype = first, self.graph.call_function(getattr, (first, "dtype")) if self.plan.half else None
        if dtype is not None:  # a sum in float16 may overflow
            x = self.graph.call_method("to", (x, self.graph.call_function(torch.promote_types, (dtype, torch.float32))))
        for y in others:
            x = self.graph.call_function(operator.add, (x, y))
        if (divisor := divisor_of(aggregation, len(sources))) != 1:
            x = self.graph.call_function(operator.truediv, (x, divisor))
        return self._activated(x if dtype is None else self.graph.call_method("to", (x, dtype)))

    def _all_aligned(self, sources: Sequence[Value], how: Subsample | Wanted) -> Value:
        """Align a tensor, or a residual and a shortcut, to the shape of the last of `sources`, or as `how` says."""
        y, like = sources[0], sources[-1]
        like = like if isinstance(like, fx.Node) else like[0]
        if isinstance(y, fx.Node):
            return self._aligned(y, like, how)
        return self._aligned(y[0], like, how), self._aligned(y[1], like, how)

    def _aligned(self, y: fx.Node, like: fx.Node, how: Subsample | Wanted) -> fx.Node:
        self._check(y, how.unseen)
        if isinstance(how, Subsample):
            if any(stride > 1 for stride in how.strides):
                places = (slice(None), slice(None), *(slice(None, None, stride) for stride in how.strides))
                y = self.graph.call_function(operator.getitem, (y, places))
            if how.like is not None and not all(map(is_own_module, self.stack.flat())):  # ours round up, like slices
                self._check_same(y, like, range(2, 2 + len(how.strides)))
            padding = [0, 0] * len(how.strides) + [0, how.zeros]
            return self.graph.call_function(F.pad, (y, padding)) if how.zeros else y
        assert self.stack.align is not None
        shape = self.graph.call_function(getattr, (like, "shape")) if how.like is not None else None
        shape = shape or self.graph.call_function(torch.Size, (list(self._lengths(y, how)),))
        if isinstance(self.stack.align, nn.Module):
            return self.graph.call_module("align", (y, shape))
        return self.graph.call_function(_function(self.stack.align), (y, shape))

    def _lengths(self, y: fx.Node, how: Wanted) -> Iterator[fx.Node | int]:
        """Yield n * up / down, rounded up, for every axis."""
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
        """Fail instead of guessing strides that the example did not show."""
        for axis, length in unseen:
            self._expect(
                (self.graph.call_method("size", (y, axis)), length),
                f"axis {axis} of an output had length {length} when the network was pruned, which did not show how it "
                "is aligned at other lengths. Prune with an example of this size.",
            )

    def _check_same(self, y: fx.Node, like: fx.Node, axes: Iterable[int]) -> None:
        """Fail instead of broadcasting a sum."""
        for axis in axes:
            self._expect(
                (self.graph.call_method("size", (y, axis)), self.graph.call_method("size", (like, axis))),
                "an input of this size needs sources aligned in another way than the example did. "
                "Prune with an example of this size.",
            )

    def _expect(self, both: tuple[fx.Node, fx.Node | int], text: str) -> None:
        same = self.graph.call_function(operator.eq, both)
        self.graph.call_function(torch._assert, (same, text))


def _never_in_place(module: nn.Module) -> bool:
    if _is_residual(module):
        return _never_in_place(module.residual) and _never_in_place(module.shortcut)
    if is_simple_sequence(module):
        return _never_in_place(cast(nn.Sequential, module)[0])
    ours = is_own_module(module) and not isinstance(module, MaskedStack)
    return ours or is_plain(module, (*NEVER_IN_PLACE, nn.Identity))


def _is_residual(module: nn.Module) -> TypeGuard[Residual]:
    """Return whether a module only calls a body and a shortcut."""
    return (
        isinstance(module, Residual) and type(module).forward is Residual.forward and is_plain(module, (type(module),))
    )


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Return the named arguments of a module, the input first."""
    module = module.residual if _is_residual(module) else module
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(module.forward).parameters.values() if p.kind in named]


def _find(signature: list[inspect.Parameter], name: str | int) -> inspect.Parameter | None:
    """Return the argument with this name, or at this position."""
    if isinstance(name, int):
        return signature[name] if name < len(signature) else None
    return next((p for p in signature if p.name == name), None)


def _is_simple(default: object) -> bool:
    return default is None or isinstance(default, bool | int | float | str)


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a name, which graphs need."""
    if getattr(call, "__name__", "<lambda>") != "<lambda>":
        return call

    def called(*args: Any) -> Any:
        return call(*args)

    return called


def ones_for(sources: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return a mask of ones for sources that are not all tensors."""
    like = next((leaf for leaf in tree_leaves(sources) if isinstance(leaf, Tensor)), torch.empty(0))
    return torch.ones(len(sources), dtype=dtype, device=like.device)
