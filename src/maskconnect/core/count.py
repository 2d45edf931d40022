"""The size of a network: its weights, the weights that pruning leaves (D10), and its mask entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from torch import nn

from maskconnect.core.lookup import masks_of, stacks_of
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack

Place = tuple[nn.Module, str]
"""Where a module is registered: its parent module and its name there."""


class ParameterCount(NamedTuple):
    """The result of `mc.count_parameters`."""

    weights: int
    """The number of weights, as in the paper's tables; independent of the fan-in."""
    mask_entries: int
    """The number of candidate connections whose masks are, or were, learned."""


class PrunedCount(NamedTuple):
    """The result of `pruned_parameters`: numbers of weights, without masks."""

    weights: int
    """The weights of the whole network."""
    one_step: int
    """The weights without modules that no other module reads, as in the paper."""
    transitive: int
    """The weights without modules that cannot reach the output, as after `mc.prune`."""


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count the weights and the learned mask entries of a model.

    Args:
        model: any model, with or without `MaskedStack`s.

    Returns:
        A named tuple with `weights` and `mask_entries`.

    Example:
        ```python
        weights, mask_entries = mc.count_parameters(model)
        ```
    """
    masks = masks_of(model)
    real = {id(m.real) for m in masks}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in real)
    return ParameterCount(weights, sum(m.entries for m in masks if m.learned))


def pruned_parameters(model: nn.Module) -> PrunedCount:
    """Count the weights that pruning would leave with the frozen wiring, or with the current top-K.

    A weight that another part of the model also uses is counted once, and stays.
    """
    weights = count_parameters(model).weights
    return PrunedCount(weights, _weights(model, _read_or_last), _weights(model, _alive))


Way = frozenset[tuple[MaskedStack, int]]
"""Modules of nested stacks, each as (stack, flat number), that must all stay so that the innermost one stays."""


def weights_by_ways(model: nn.Module) -> dict[frozenset[Way], int]:
    """Count weights by the ways on which they depend: the weights of an entry stay if all modules of any way stay."""
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
    """Apply the paper's rule once: remove modules that no other module reads, except for outputs."""
    readers, outputs = stack.masks.current_wiring().readers, stack.layout.outputs
    return [count > 0 or number in outputs for number, count in enumerate(readers)]


def _alive(stack: MaskedStack) -> Sequence[bool]:
    return stack.masks.current_wiring().alive


def _weights(model: nn.Module, stays: Callable[[MaskedStack], Sequence[bool]]) -> int:
    gone: set[Place] = set()
    for _, stack in stacks_of(model):
        gone |= {place for place, on in zip(stack.places(), stays(stack), strict=True) if not on}
    parts = dict.fromkeys(_kept(model, gone))
    kept = {p for part in parts for p in part.parameters(recurse=False)}
    unread = sum(part.unread_weights() for part in parts if isinstance(part, MaskedStack))
    return sum(p.numel() for p in kept) - unread


def _kept(part: nn.Module, gone: Set[Place]) -> Iterator[nn.Module]:
    """Yield a module and all modules inside it, except for masks and for modules at places in `gone`."""
    yield part
    for name, child in part._modules.items():
        if child is not None and (part, name) not in gone and not isinstance(child, ConnectivityMasks):
            yield from _kept(child, gone)
