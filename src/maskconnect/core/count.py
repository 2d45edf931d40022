"""How large a network is: its weights, what pruning leaves of them (D10), and the masks that learn how to wire it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from torch import nn

from maskconnect.core.lookup import masks_of, stacks_of
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack

Place = tuple[nn.Module, str]
"""Where a module is registered: in which other module, under which name."""


class ParameterCount(NamedTuple):
    """What `mc.count_parameters` returns."""

    weights: int  # what the paper's tables count; the same for every fan-in
    mask_entries: int  # candidate connections whose masks are, or were, learned


class PrunedCount(NamedTuple):
    """What `pruned_parameters` returns: numbers of weights, without masks."""

    weights: int  # of the whole network
    one_step: int  # without the modules that no other module reads, as in the paper
    transitive: int  # without all that cannot reach the output, as `prune` leaves it


def count_parameters(model: nn.Module) -> ParameterCount:
    """The number of weights, and of the entries of learned masks, in a model."""
    masks = masks_of(model)
    real = {id(m.real) for m in masks}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in real)
    return ParameterCount(weights, sum(m.entries for m in masks if m.learned))


def pruned_parameters(model: nn.Module) -> PrunedCount:
    """How many weights pruning would leave, with the wiring that is frozen, or with the present top-K.

    A weight that something else in the model uses too is counted once, and stays.
    """
    weights = count_parameters(model).weights
    return PrunedCount(weights, _weights(model, _read_or_last), _weights(model, _alive))


Way = frozenset[tuple[MaskedStack, int]]
"""Modules of stacks, each a stack and a flat number, that must all stay for what is inside of the innermost to stay."""


def weights_by_ways(model: nn.Module) -> dict[frozenset[Way], int]:
    """How many weights stay together, whatever the wiring: those of one entry stay where any of its ways does."""
    ways: dict[nn.Parameter, set[Way]] = {}

    outside = {place for _, stack in stacks_of(model) for place in stack.places()}

    def walk(part: nn.Module, way: Way) -> None:
        for inner in _kept(part, outside):
            for p in inner.parameters(recurse=False):
                ways.setdefault(p, set()).add(way)
            if isinstance(inner, MaskedStack):
                for number, block in enumerate(inner.flat()):
                    walk(block, way | {(inner, number)})

    walk(model, frozenset())
    sizes: Counter[frozenset[Way]] = Counter()
    for p, found in ways.items():
        sizes[frozenset(found)] += p.numel()
    return dict(sizes)


def _read_or_last(stack: MaskedStack) -> Sequence[bool]:
    """The paper's rule, applied once: what no other module reads goes, unless it is an output."""
    readers, outputs = stack.masks.settled().readers, stack.layout.outputs
    return [count > 0 or number in outputs for number, count in enumerate(readers)]


def _alive(stack: MaskedStack) -> Sequence[bool]:
    return stack.masks.settled().alive


def _weights(model: nn.Module, stays: Callable[[MaskedStack], Sequence[bool]]) -> int:
    gone: set[Place] = set()
    for _, stack in stacks_of(model):
        gone |= {place for place, on in zip(stack.places(), stays(stack), strict=True) if not on}
    parts = dict.fromkeys(_kept(model, gone))
    kept = {p for part in parts for p in part.parameters(recurse=False)}
    unread = sum(part.unread_weights() for part in parts if isinstance(part, MaskedStack))
    return sum(p.numel() for p in kept) - unread


def _kept(part: nn.Module, gone: Set[Place]) -> Iterator[nn.Module]:
    """A module and all inside of it, but for masks and for what is registered in places that go."""
    yield part
    for name, child in part._modules.items():
        if child is not None and (part, name) not in gone and not isinstance(child, ConnectivityMasks):
            yield from _kept(child, gone)
