"""Convolutions that read the same become one, and so do those that are summed (after the freeze, section 3.5).

    read the same      W_1 x, ..., W_n x     one convolution with the outputs of all
    then, in step      V_1 y_1, ..., V_n y_n     one grouped convolution
    are summed         U_1 z_1 + ... + U_n z_n     one convolution that reads all

With K=C that is ResNeXt as it was published, of dense and grouped convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from maskconnect.core.fold import calls_of, is_plain
from maskconnect.core.sums import replace, sums_of, terms_of

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish)


def merge_(network: fx.GraphModule) -> None:
    """Merge all convolutions that can be."""
    for root in sums_of(network.graph):
        _merge_sum(network, root)
    readers: dict[Any, list[fx.Node]] = {}
    for node in network.graph.nodes:
        conv = convolution(network, node)
        if conv is not None:
            readers.setdefault((node.args[0], *_geometry(conv), _follows(network, node)), []).append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            _Siblings(network, nodes).merge()
    _join_neighbours(network)


def _join_neighbours(network: fx.GraphModule) -> None:
    """Channels that were taken apart and are put together again need neither."""
    graph = network.graph
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not torch.cat or node.kwargs != {"dim": 1}:
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
    """Some of the channels of a node."""

    whole: fx.Node
    start: int
    width: int  # -1: all that there are

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
        return network.graph.call_function(torch.narrow, (self.whole, 1, self.start, self.width))


def _channels(network: fx.GraphModule, node: fx.Node) -> int:
    """How many channels the merged convolution has that a node is, or follows."""
    while not isinstance(module := network.get_submodule(str(node.target)), nn.Conv2d):
        node = cast(fx.Node, node.args[0])
    return module.out_channels


def convolution(network: fx.GraphModule, node: fx.Node) -> nn.Conv2d | None:
    """The dense convolution that a node calls, if no other node does."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    module = network.get_submodule(str(node.target))
    once = len(calls_of(network)[str(node.target)]) == 1
    return cast(nn.Conv2d, module) if once and is_plain(module, (nn.Conv2d,)) and module.groups == 1 else None


def _geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    place = conv.weight.device, conv.weight.dtype, conv.weight.requires_grad
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode, conv.bias is None, *place


def _follows(network: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """The kinds of what follows a node, up to the next that is neither norm nor activation.

    Only what is followed alike is merged, because taking channels apart again costs more than it saves.
    """
    kinds: list[Any] = []
    while len(node.users) == 1 and (not kinds or kinds[-1] in (nn.BatchNorm2d, *ACTIVATIONS)):
        node = next(iter(node.users))
        kinds.append(type(network.get_submodule(str(node.target))) if node.op == "call_module" else node.target)
    return tuple(kinds)


def _like(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None, groups: int = 1) -> nn.Conv2d:
    """A convolution of the same geometry with other weights."""
    new = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        conv.dilation,  # type: ignore[arg-type]
        groups,
        padding_mode=conv.padding_mode,
        bias=bias is not None,
        device="meta",
    )
    new.weight = nn.Parameter(weight.detach(), conv.weight.requires_grad)
    new.bias = None if bias is None else nn.Parameter(bias.detach(), conv.weight.requires_grad)
    return new.train(conv.training)


def _biases(convs: Sequence[nn.Conv2d]) -> list[Tensor]:
    return [conv.bias for conv in convs if conv.bias is not None]


def _merge_sum(network: fx.GraphModule, root: fx.Node) -> None:
    """The convolutions of a sum that nothing else reads become one, of all that they read."""
    terms = before = terms_of(root)
    alike: dict[Any, list[fx.Node]] = {}
    for node, factor in terms:
        conv = convolution(network, node)
        if conv is not None and factor == 1 and len(node.users) == 1:
            alike.setdefault((conv.out_channels, *_geometry(conv)), []).append(node)
    for nodes in alike.values():
        if len(nodes) < 2:
            continue
        convs = [cast(nn.Conv2d, convolution(network, node)) for node in nodes]
        biases = _biases(convs)
        weight = torch.cat([conv.weight.detach() for conv in convs], dim=1)
        merged = _like(convs[0], weight, torch.stack(biases).sum(0) if biases else None)
        network.set_submodule(str(nodes[0].target), merged)
        with network.graph.inserting_before(root):
            together = network.graph.call_function(torch.cat, ([node.args[0] for node in nodes],), {"dim": 1})
            new = network.graph.call_module(str(nodes[0].target), (together,))
        terms = [(new, 1.0), *((node, factor) for node, factor in terms if node not in nodes)]
    if terms != before:
        replace(network.graph, root, terms)
        network.graph.eliminate_dead_code()


class _Siblings:
    """Convolutions that read the same, and what follows each of them as long as that is alike."""

    def __init__(self, network: fx.GraphModule, nodes: list[fx.Node]) -> None:
        self.network, self.graph, self.parts = network, network.graph, nodes
        convs = [self._module(node) for node in nodes]
        self.widths = [conv.out_channels for conv in convs]
        self.merged = nodes[0].prev

    def merge(self) -> None:
        """Merge them, and all that follows."""
        x = self.parts[0].args[0]
        assert isinstance(x, fx.Node)
        convs = [self._module(node) for node in self.parts]
        biases = _biases(convs)
        weight = torch.cat([conv.weight.detach() for conv in convs])
        self._append(x, _like(convs[0], weight, torch.cat(biases) if biases else None), after=self.parts[0].prev)
        while self._step():
            pass
        self._hand_out()

    def _step(self) -> bool:
        """Merge what follows; whether that was possible."""
        users = [list(node.users) for node in self.parts]
        nexts = [user[0] for user in users if len(user) == 1 and user[0].op == "call_module" and len(user[0].args) == 1]
        if len(set(nexts)) != len(self.parts) or any(node.kwargs for node in nexts):
            return False
        modules = [self._module(node) for node in nexts]
        new = self._together(nexts, modules)
        if new is None:
            return False
        self.parts = nexts
        self._append(self.merged, new)
        return True

    def _together(self, nodes: Sequence[fx.Node], modules: Sequence[Any]) -> nn.Module | None:
        first = modules[0]
        if all(is_plain(m, ACTIVATIONS) and repr(m) == repr(first) for m in modules):
            return cast(nn.Module, first)
        if any(len(calls_of(self.network)[str(node.target)]) > 1 for node in nodes):
            return None
        if all(is_plain(m, (nn.BatchNorm2d,)) for m in modules):
            return _joined_norm(modules)
        if all(convolution(self.network, node) is not None for node in nodes):
            shapes = {(m.weight.shape, *_geometry(m)) for m in modules}
            # One that widens stays apart: each of its outputs is read by itself, and they are what is large.
            if len(shapes) == 1 and first.out_channels <= first.in_channels:
                biases = _biases(modules)
                weight = torch.cat([m.weight.detach() for m in modules])
                self.widths = [m.out_channels for m in modules]
                return _like(first, weight, torch.cat(biases) if biases else None, groups=len(modules))
        return None

    def _append(self, x: fx.Node, module: nn.Module, after: fx.Node | None = None) -> None:
        """The next node of the merged ones; it has the name of the first of those that it replaces."""
        path = str(self.parts[0].target)
        self.network.set_submodule(path, module)
        with self.graph.inserting_after(after or x):
            self.merged = self.graph.call_module(path, (x,))

    def _hand_out(self) -> None:
        """Each reader gets its part of the channels."""
        start, after = 0, self.merged
        for node, width in zip(self.parts, self.widths, strict=True):
            with self.graph.inserting_after(after):
                after = self.graph.call_function(torch.narrow, (self.merged, 1, start, width))
            node.replace_all_uses_with(after)
            start += width
        self.graph.eliminate_dead_code()

    def _module(self, node: fx.Node) -> Any:
        return self.network.get_submodule(str(node.target))


def _joined_norm(norms: Sequence[nn.BatchNorm2d]) -> nn.BatchNorm2d | None:
    """One batch norm for the channels of all."""
    kinds = {(n.eps, n.momentum, n.affine, n.track_running_stats, n.training) for n in norms}
    if len(kinds) != 1:
        return None
    eps, momentum, affine, track, training = kinds.pop()
    first = next(iter([*norms[0].parameters(), *norms[0].buffers()]), torch.empty(0))
    joined = nn.BatchNorm2d(
        sum(n.num_features for n in norms), eps, momentum, affine, track, device=first.device, dtype=first.dtype
    )
    state = [n.state_dict() for n in norms]
    joined.load_state_dict(
        {name: torch.cat([s[name] for s in state]) if value.dim() else value for name, value in state[0].items()}
    )
    for name, parameter in joined.named_parameters():
        parameter.requires_grad_(dict(norms[0].named_parameters())[name].requires_grad)
    return joined.train(training)
