"""Merge convolutions with the same input, together with the modules that follow each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from maskconnect.pruning.graphs import ACTIVATIONS, is_plain
from maskconnect.pruning.passes.convolutions import CHANNELS, Calls, biases, geometry, joined_norm, like


class Siblings:
    """Convolutions with the same input, and the modules that follow each of them, as long as these match."""

    def __init__(self, calls: Calls, nodes: list[fx.Node]) -> None:
        self.calls, self.graph, self.parts = calls, calls.network.graph, nodes
        self.widths = [calls.module(node).out_channels for node in nodes]
        self.merged = nodes[0].prev

    def merge(self) -> None:
        """Merge the convolutions and the modules that follow."""
        x = self.parts[0].args[0]
        assert isinstance(x, fx.Node)
        convs = [self.calls.module(node) for node in self.parts]
        found = biases(convs)
        weight = torch.cat([conv.weight.detach() for conv in convs])
        self._append(x, like(convs, weight, torch.cat(found) if found else None), after=self.parts[0].prev)
        while self._step():
            pass
        self._split_channels()

    def _step(self) -> bool:
        """Merge the next modules; return whether this was possible."""
        users = [list(node.users) for node in self.parts]
        nexts = [user[0] for user in users if len(user) == 1 and user[0].op == "call_module" and len(user[0].args) == 1]
        if len(set(nexts)) != len(self.parts) or any(node.kwargs for node in nexts):
            return False
        new = self._together(nexts, [self.calls.module(node) for node in nexts])
        if new is None:
            return False
        self.parts = nexts
        self._append(self.merged, new)
        return True

    def _together(self, nodes: Sequence[fx.Node], modules: Sequence[Any]) -> nn.Module | None:
        first = modules[0]
        if all(is_plain(m, ACTIVATIONS) and repr(m) == repr(first) for m in modules):
            return cast(nn.Module, first)
        if not all(map(self.calls.once, nodes)):
            return None
        if all(is_plain(m, (nn.BatchNorm2d,)) for m in modules):
            return joined_norm(modules)
        if all(self.calls.convolution(node) is not None for node in nodes):
            shapes = {(m.weight.shape, *geometry(m)) for m in modules}
            # Do not merge one that widens: its large outputs are read separately and would have to be split.
            if len(shapes) == 1 and first.out_channels <= first.in_channels:
                found = biases(modules)
                weight = torch.cat([m.weight.detach() for m in modules])
                self.widths = [m.out_channels for m in modules]
                return like(modules, weight, torch.cat(found) if found else None, groups=len(modules))
        return None

    def _append(self, x: fx.Node, module: nn.Module, after: fx.Node | None = None) -> None:
        """Add the next merged node, under the name of the first node that it replaces."""
        path = str(self.parts[0].target)
        self.calls.network.set_submodule(path, module)
        with self.graph.inserting_after(after or x):
            self.merged = self.graph.call_module(path, (x,))

    def _split_channels(self) -> None:
        """Give each reader its part of the channels."""
        start, after = 0, self.merged
        for node, width in zip(self.parts, self.widths, strict=True):
            with self.graph.inserting_after(after):
                after = self.graph.call_function(torch.narrow, (self.merged, CHANNELS, start, width))
            start += width
            if any(map(self._writes_over, node.users)):
                with self.graph.inserting_after(after):  # a view must not be overwritten
                    after = self.graph.call_method("clone", (after,))
            node.replace_all_uses_with(after)
        self.graph.eliminate_dead_code()

    def _writes_over(self, user: fx.Node) -> bool:
        return user.op == "call_module" and bool(getattr(self.calls.module(user), "inplace", False))


def follows(calls: Calls, node: fx.Node) -> tuple[Any, ...]:
    """Return the classes of the modules after a node, up to the first that is neither norm nor activation.

    Only nodes with equal followers are merged, because splitting channels again costs more than merging saves.
    """
    kinds: list[Any] = []
    while len(node.users) == 1 and (not kinds or kinds[-1] in (nn.BatchNorm2d, *ACTIVATIONS)):
        node = next(iter(node.users))
        kinds.append(type(calls.module(node)) if node.op == "call_module" else node.target)
    return tuple(kinds)


def join_neighbors(network: fx.GraphModule) -> None:
    """Remove splits of channels that are concatenated again."""
    graph = network.graph
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not torch.cat or node.kwargs != {"dim": CHANNELS}:
            continue
        parts: list[_Part] = []
        for part in map(_Part.of, cast(Sequence[fx.Node], node.args[0])):
            if parts and parts[-1].ends_where(part):
                part = _Part(part.whole, parts[-1].start, parts.pop().width + part.width)
            parts.append(part)
        with graph.inserting_before(node):
            new = [part.write(network) for part in parts]
            node.replace_all_uses_with(new[0] if len(new) == 1 else graph.call_function(torch.cat, (new,), node.kwargs))
    graph.eliminate_dead_code()


class _Part(NamedTuple):
    """A range of the channels of a node."""

    whole: fx.Node
    start: int
    width: int  # -1 for all channels

    @classmethod
    def of(cls, node: fx.Node) -> _Part:
        if node.target is not torch.narrow:
            return cls(node, 0, -1)
        whole, _, start, width = cast(tuple[fx.Node, int, int, int], node.args)
        return cls(whole, start, width)

    def ends_where(self, other: _Part) -> bool:
        return self.whole is other.whole and self.width >= 0 and self.start + self.width == other.start

    def write(self, network: fx.GraphModule) -> fx.Node:
        if self.width < 0 or self.width == _channels(network, self.whole):
            return self.whole
        return network.graph.call_function(torch.narrow, (self.whole, CHANNELS, self.start, self.width))


def _channels(network: fx.GraphModule, node: fx.Node) -> int:
    """Return the number of channels of the merged convolution at a node, or before it."""
    while not isinstance(module := network.get_submodule(str(node.target)), nn.Conv2d):
        node = cast(fx.Node, node.args[0])
    return module.out_channels
