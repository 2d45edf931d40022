"""How large a network is: its weights, what pruning leaves of them (D10), and the masks that learn how to wire it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from maskconnect.core.lookup import masks_of, stacks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConnectivityError


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
    prunable_stacks_of(model)
    weights = count_parameters(model).weights
    return PrunedCount(weights, _weights(model, _read_or_last), _weights(model, _alive))


def prunable_stacks_of(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    """Every stack of a model under each of its names, outer ones first; an error if modules cannot be taken out."""
    found = stacks_of(model)
    for name, stack in found:
        if not stack.runs_its_modules:
            raise ConnectivityError(
                f"the blocks of {name or type(model).__name__!r} come from mc.rewire: the model itself runs them, "
                "so none can be taken out. Only a network that is built with mc.MaskedStack can be pruned."
            )
    return found


Way = frozenset[tuple[MaskedStack, int]]
"""Modules of stacks, each a stack and a flat number, that must all stay for what is inside of the innermost to stay."""


def weights_by_ways(model: nn.Module) -> dict[frozenset[Way], int]:
    """How many weights stay together, whatever the wiring: those of one entry stay where any of its ways does."""
    ways: dict[nn.Parameter, set[Way]] = {}

    def walk(part: nn.Module, way: Way) -> None:
        stacks: list[MaskedStack] = []

        def nothing(stack: MaskedStack) -> Sequence[bool]:
            stacks.append(stack)
            return [False] * len(stack.flat())

        for inner in _kept(part, nothing):
            for p in inner.parameters(recurse=False):
                ways.setdefault(p, set()).add(way)
        for stack in stacks:
            for number, block in enumerate(stack.flat()):
                walk(block, way | {(stack, number)})

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
    parts = dict.fromkeys(_kept(model, stays))
    kept = {p for part in parts for p in part.parameters(recurse=False)}
    unread = sum(part.unread_weights() for part in parts if isinstance(part, MaskedStack))
    return sum(p.numel() for p in kept) - unread


def _kept(part: nn.Module, stays: Callable[[MaskedStack], Sequence[bool]]) -> Iterator[nn.Module]:
    """A module and all inside of it, but for masks and for the modules of stacks that go."""
    yield part
    children = list(part.children())
    if isinstance(part, MaskedStack):
        blocks = part.flat()
        children = [child for child in children if child not in (part.masks, getattr(part, "blocks", None), *blocks)]
        children += [block for block, on in zip(blocks, stays(part), strict=True) if on]
    for child in children:
        yield from _kept(child, stays)
