"""Compare what pruning removes from a network with random wirings of the same fan-in."""

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
    """The number of weights that one of the two pruning rules leaves."""

    learned: int  # with the wiring of the model
    draws: tuple[int, ...]  # with each random wiring

    @property
    def mean(self) -> float:
        """The mean over the draws."""
        return statistics.fmean(self.draws)

    @property
    def deviation(self) -> float:
        """The standard deviation of the draws (n - 1)."""
        return statistics.stdev(self.draws)

    @property
    def smallest(self) -> int:
        """The weights left by the draw that lost most."""
        return min(self.draws)

    @property
    def largest(self) -> int:
        """The weights left by the draw that lost least."""
        return max(self.draws)

    def share_that_lost_as_much(self) -> float:
        """Return the share of draws that lost at least as many weights as the learned wiring."""
        return sum(left <= self.learned for left in self.draws) / len(self.draws)


@dataclass(frozen=True)
class RandomPruning:
    """The weights that pruning leaves of a model, and with random wirings of the same fan-in."""

    weights: int  # of the unpruned model
    transitive: WeightsLeft  # without modules that cannot reach the output, as in `prune`
    one_step: WeightsLeft  # without modules that no other module reads, as in the paper


def random_pruning(model: nn.Module, draws: int = 200, seed: int = 0) -> RandomPruning:
    """Return the weights that random wirings leave: each stack is redrawn with its fan-in, as connectivity="random".

    Weights are counted as in `pruned_parameters`, which counts those of the current wiring.
    """
    stacks = list(dict.fromkeys(stack for _, stack in stacks_of(model)))
    if not stacks:
        raise ConfigError(f"this {type(model).__name__} has no MaskedStack; pass a network with learned connectivity.")
    if integer("draws", draws) < 2:
        raise ConfigError(f"draws is {draws}; it must be 2 or more, for a mean and a deviation.")
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
    """Yield one random wiring per stack for every draw, with its candidates and fan-in; stacks are independent."""
    seeds = random.Random(integer("seed", seed))
    rules = [(stack.masks.candidates, stack.masks.fan_in.tolist()) for stack in stacks]
    for _ in range(draws):
        yield [random_sources(candidates, fan_in, seeds.getrandbits(63)) for candidates, fan_in in rules]


def _reaching(stack: MaskedStack, sources: Sources) -> Collection[int]:
    """Return the modules that the transitive rule keeps: those that can reach the output."""
    return {k for k, on in enumerate(reaching_output(sources, stack.layout.outputs)) if on}


def _read(stack: MaskedStack, sources: Sources) -> Collection[int]:
    """Return the modules that the paper's rule keeps, applied once: those that are read, and the outputs."""
    return {k for row in sources for k in row}.union(stack.layout.outputs)


def _left(sizes: Mapping[frozenset[Way], int], stays: Mapping[MaskedStack, Collection[int]]) -> int:
    """Return the number of weights left if these modules stay."""
    return sum(size for ways, size in sizes.items() if any(all(k in stays[stack] for stack, k in way) for way in ways))
