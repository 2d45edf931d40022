"""What random wirings of the same fan-in would have lost, beside what the learned one did."""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from maskconnect.core.count import Way, pruned_parameters, weights_by_ways
from maskconnect.core.lookup import stacks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.core.wiring import Sources, random_sources, reaching_output
from maskconnect.errors import ConfigError, integer


@dataclass(frozen=True)
class WeightsLeft:
    """How many weights pruning leaves, by one of its two rules."""

    learned: int  # with the wiring that the model has
    draws: tuple[int, ...]  # with every random one

    @property
    def mean(self) -> float:
        """Over the draws."""
        return statistics.fmean(self.draws)

    @property
    def deviation(self) -> float:
        """The standard deviation of the draws (n - 1)."""
        return statistics.stdev(self.draws)

    @property
    def smallest(self) -> int:
        """Of the draw that lost most."""
        return min(self.draws)

    @property
    def largest(self) -> int:
        """Of the draw that lost least."""
        return max(self.draws)

    def share_that_lost_as_much(self) -> float:
        """The share of draws that lost at least as many weights as the learned wiring did."""
        return sum(left <= self.learned for left in self.draws) / len(self.draws)


@dataclass(frozen=True)
class RandomPruning:
    """What pruning leaves of a model, and what it would leave with random wirings of the same fan-in."""

    weights: int  # of the whole model
    transitive: WeightsLeft  # without all that cannot reach the output, as `prune` leaves it
    one_step: WeightsLeft  # without the modules that no other module reads, as in the paper


def random_pruning(model: nn.Module, draws: int = 200, seed: int = 0) -> RandomPruning:
    """What random wirings would have lost: every stack drawn anew as connectivity="random" does, with its fan-in.

    Weights are counted as `pruned_parameters` counts them, which gives those of the present wiring.
    """
    stacks = list(dict.fromkeys(stack for _, stack in stacks_of(model)))
    if not stacks:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    if integer("draws", draws) < 2:
        raise ConfigError(f"draws is {draws}; a mean and a deviation need 2 or more.")
    sizes, now = weights_by_ways(model), pruned_parameters(model)
    transitive, one_step = [], []
    for wirings in random_wirings(stacks, draws, seed):
        drawn = dict(zip(stacks, wirings, strict=True))
        transitive.append(_left(sizes, {stack: _reaching(stack, sources) for stack, sources in drawn.items()}))
        one_step.append(_left(sizes, {stack: _read(stack, sources) for stack, sources in drawn.items()}))
    return RandomPruning(
        weights=now.weights,
        transitive=WeightsLeft(now.transitive, tuple(transitive)),
        one_step=WeightsLeft(now.one_step, tuple(one_step)),
    )


def random_wirings(stacks: Sequence[MaskedStack], draws: int, seed: int) -> Iterator[list[Sources]]:
    """In every draw a random wiring a stack, of its own candidates and fan-in; stacks draw independently."""
    seeds = random.Random(integer("seed", seed))
    rules = [(stack.masks.candidates, stack.masks.fan_in.tolist()) for stack in stacks]
    for _ in range(draws):
        yield [random_sources(candidates, fan_in, seeds.getrandbits(63)) for candidates, fan_in in rules]


def _reaching(stack: MaskedStack, sources: Sources) -> Collection[int]:
    """The transitive rule: what can reach the output stays."""
    return {k for k, on in enumerate(reaching_output(sources, stack.layout.outputs)) if on}


def _read(stack: MaskedStack, sources: Sources) -> Collection[int]:
    """The paper's rule, applied once: what is read stays, and the output."""
    return {k for row in sources for k in row}.union(stack.layout.outputs)


def _left(sizes: Mapping[frozenset[Way], int], stays: Mapping[MaskedStack, Collection[int]]) -> int:
    """How many weights are left where these modules of stacks stay."""
    return sum(size for ways, size in sizes.items() if any(all(k in stays[stack] for stack, k in way) for way in ways))
