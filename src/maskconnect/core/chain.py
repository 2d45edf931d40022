"""The graph of a chain, or of layers whose branches each read for themselves, as its plan says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maskconnect.core.aggregate import divisor_of
from maskconnect.core.graphs import CONVOLUTIONS, NORMS, graph_module, is_ours, is_plain, is_simple_sequence
from maskconnect.core.inputs import active_places, cloned
from maskconnect.core.plan import Axes, Plan, Step, Subsample, Wanted, alive_blocks, is_argument
from maskconnect.core.stack import MaskedStack

NEVER_IN_PLACE = (nn.Linear, *CONVOLUTIONS, *NORMS, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither change what they read nor return it."""

EMPTY = inspect.Parameter.empty


class Chain:
    """The graph of a chain, or of layers whose branches each read for themselves."""

    def __init__(self, stack: MaskedStack, plan: Plan) -> None:
        self.stack, self.plan, self.places = stack, plan, stack.layout.places
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
        """The whole of it."""
        found: dict[int, fx.Node] = {}
        last = self.x
        for step in self.plan.steps:
            sources = [found[number] for number in step.reads]
            if step.how is not None:
                last = self._aligned(sources, step.how)
            else:
                last = self._aggregate(sources, step.number) if sources else self.x
                if step.number < len(self.places):
                    layer, branch = self.places[step.number]
                    path = f"blocks.{layer}.{branch}" if self.stack.layout.layered else f"blocks.{layer}"
                    module = self.root.get_submodule(path)
                    if self._passes_on(sources) and self._is_read_elsewhere(step) and not _never_in_place(module):
                        last = self._copied(last)
                    last = self._call(module, path, last)
            found[step.number] = last
        self.graph.output(last)
        return graph_module(self.root, self.graph)

    def _placeholders(self) -> list[tuple[str | int, fx.Node]]:
        """The further arguments, with the names of the first module's, and the defaults that all modules agree on."""
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

    def _is_read_elsewhere(self, step: Step) -> bool:
        """Whether another step reads something that this one does, which a module may change in place."""
        base = {each.number: each.reads[0] for each in self.plan.steps if each.how is not None}

        def sources(each: Step) -> set[int]:
            return {base.get(k, k) for k in each.reads or (-1,)}

        others = [each for each in self.plan.steps if each.how is None and each is not step]
        return any(sources(step) & sources(other) for other in others)

    def _copied(self, x: fx.Node) -> fx.Node:
        return self.graph.call_method("clone", (x,)) if self.plan.tensors else self.graph.call_function(cloned, (x,))

    def _scaled(self, sources: list[fx.Node], target: int) -> fx.Node:
        """The sum of sources, each times its scale."""
        stack, name = self.stack, f"scales{target}"
        assert stack.scales is not None
        places = active_places(stack.masks.candidates[target], stack.masks.settled().sources[target])
        row = stack.scales.detach()[target - stack.layout.targets.start, places]
        self.root.register_parameter(name, nn.Parameter(row.clone()))
        scales = self.graph.get_attr(name)
        factors = [self.graph.call_function(operator.getitem, (scales, place)) for place in range(len(sources))]
        scaled = [self.graph.call_function(operator.mul, pair) for pair in zip(sources, factors, strict=True)]
        x = scaled[0]
        for y in scaled[1:]:
            x = self.graph.call_function(operator.add, (x, y))
        return x

    def _aggregate(self, sources: list[fx.Node], target: int) -> fx.Node:
        """One source as it is; the sum of several, divided; or what the user's own aggregation makes of any."""
        aggregation = self.stack.aggregation
        if callable(aggregation):
            kind = self.stack.masks.real.dtype
            if self.plan.tensors:
                ones = self.graph.call_method("new_ones", (sources[0], len(sources)), {"dtype": kind})
            else:
                ones = self.graph.call_function(ones_for, (sources, kind))
            if isinstance(aggregation, nn.Module):
                return self.graph.call_module("aggregation", (sources, ones))
            return self.graph.call_function(_function(aggregation), (sources, ones))
        if aggregation == "scaled":
            return self._scaled(sources, target)
        first, *others = sources
        if not others:
            return first
        x, dtype = first, self.graph.call_function(getattr, (first, "dtype")) if self.plan.half else None
        if dtype is not None:  # a sum in float16 may overflow
            x = self.graph.call_method("to", (x, self.graph.call_function(torch.promote_types, (dtype, torch.float32))))
        for y in others:
            x = self.graph.call_function(operator.add, (x, y))
        if (divisor := divisor_of(aggregation, len(sources))) != 1:
            x = self.graph.call_function(operator.truediv, (x, divisor))
        return x if dtype is None else self.graph.call_method("to", (x, dtype))

    def _aligned(self, sources: Sequence[fx.Node], how: Subsample | Wanted) -> fx.Node:
        y = sources[0]
        self._check(y, how.unseen)
        if isinstance(how, Subsample):
            if any(stride > 1 for stride in how.strides):
                places = (slice(None), slice(None), *(slice(None, None, stride) for stride in how.strides))
                y = self.graph.call_function(operator.getitem, (y, places))
            if how.like is not None and not all(map(is_ours, self.stack.flat())):  # ours round up, as slices do
                self._check_same(y, sources[-1], range(2, 2 + len(how.strides)))
            padding = [0, 0] * len(how.strides) + [0, how.zeros]
            return self.graph.call_function(F.pad, (y, padding)) if how.zeros else y
        assert self.stack.align is not None
        shape = self.graph.call_function(getattr, (sources[-1], "shape")) if how.like is not None else None
        shape = shape or self.graph.call_function(torch.Size, (list(self._lengths(y, how)),))
        if isinstance(self.stack.align, nn.Module):
            return self.graph.call_module("align", (y, shape))
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
            self._expect(
                (self.graph.call_method("size", (y, axis)), length),
                f"axis {axis} of an output had length {length} when the network was pruned, which did not show how it "
                "is aligned at other lengths. Prune with an example of this size.",
            )

    def _check_same(self, y: fx.Node, like: fx.Node, axes: Iterable[int]) -> None:
        """Rather an error than a sum that is broadcast."""
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
    if is_simple_sequence(module):
        return _never_in_place(cast(nn.Sequential, module)[0])
    return (is_ours(module) and not isinstance(module, MaskedStack)) or is_plain(module, NEVER_IN_PLACE)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of a module that have names, the input first."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(module.forward).parameters.values() if p.kind in named]


def _find(signature: list[inspect.Parameter], name: str | int) -> inspect.Parameter | None:
    """The argument of this name, or at this place."""
    if isinstance(name, int):
        return signature[name] if name < len(signature) else None
    return next((p for p in signature if p.name == name), None)


def _is_simple(default: object) -> bool:
    return default is None or isinstance(default, bool | int | float | str)


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function with a name, which graphs need."""
    if getattr(call, "__name__", "<lambda>") != "<lambda>":
        return call

    def called(*args: Any) -> Any:
        return call(*args)

    return called


def ones_for(sources: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A mask of ones for sources that are not all tensors."""
    like = next((leaf for leaf in tree_leaves(sources) if isinstance(leaf, Tensor)), torch.empty(0))
    return torch.ones(len(sources), dtype=dtype, device=like.device)
