"""Measure the cost of a network: multiply-accumulates and time.

A multiply-accumulate (MAC) is one product and one sum, as papers count them: half of the FLOPs that torch counts.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, integer

WARM_UP = 2
"""The number of warm-up rounds: a frozen stack finds out in its first pass which modules it can skip."""


def macs(network: nn.Module, example: Tensor | Sequence[int]) -> int:
    """Return the multiply-accumulates of one forward pass in eval mode, for one input.

    `example` is a batch, of which the first input is used, or the shape of one input: `macs(network, (3, 32, 32))`.
    Convolutions, matrix products and attention count; norms, activations and sums do not. In a stack, only modules
    that can reach the output run and count. The network is not changed.
    """
    x = _one_input(network, example)
    try:
        return _macs(_frozen_copy(network).to("meta"), x.to("meta"))
    except Exception:  # it reads values or holds plain tensors; real errors are raised again here
        return _macs(_frozen_copy(network), x)


@dataclass(frozen=True)
class Ratio:
    """The ratio of two times."""

    minima: float  # ratio of the fastest rounds
    rounds: float  # median ratio over rounds; report this one, because noise affects it least


@dataclass(frozen=True)
class Times:
    """The times of one of several interleaved variants, in seconds."""

    seconds: tuple[float, ...]  # one per round

    @property
    def minimum(self) -> float:
        """The time of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median over all rounds."""
        return statistics.median(self.seconds)

    def over(self, other: Times) -> Ratio:
        """Return the ratio to `other`, which was timed in the same rounds."""
        each = [mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)]
        return Ratio(self.minimum / other.minimum, statistics.median(each))


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int = 100,
    seconds: float = 10.0,
    *,
    least: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Time callables in turn, A B C A B C and so on, so that other load on the machine affects all of them.

    There are up to `rounds` rounds after a warm-up, fewer if another would exceed `seconds`, and at least `least`.
    """
    _check_rounds(variants, rounds, seconds, least)
    begun, found = clock(), {name: list[float]() for name in variants}
    for _ in range(WARM_UP):
        for run in variants.values():
            run()
    for done in range(1, rounds + 1):
        started = now = clock()
        for name, run in variants.items():
            before = clock()
            run()
            now = clock()
            found[name].append(now - before)
        if done >= least and (now - begun) + (now - started) > seconds:
            break
    return {name: Times(tuple(each)) for name, each in found.items()}


def latency(
    networks: Mapping[str, nn.Module], x: Tensor, rounds: int = 100, seconds: float = 10.0, *, least: int = 5
) -> dict[str, Times]:
    """Return the times of networks for the batch x, interleaved, in eval and inference mode; modes are restored."""

    def variant(network: nn.Module) -> Callable[[], None]:
        own = x.detach().clone()  # a network may change its input in place

        def run() -> None:
            network(own)
            if own.is_cuda:
                torch.cuda.synchronize(own.device)

        return run

    with _evaluating(networks.values()), torch.inference_mode():
        variants = {name: variant(network) for name, network in networks.items()}
        return interleaved(variants, rounds, seconds, least=least)


def _one_input(network: nn.Module, example: Tensor | Sequence[int]) -> Tensor:
    """Return a batch with one input."""
    if isinstance(example, Tensor):
        return example[:1].detach().clone()
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(()))
    return torch.zeros(1, *(integer("a length of example", n) for n in example), dtype=like.dtype, device=like.device)


def _frozen_copy(network: nn.Module) -> nn.Module:
    """Return a copy in eval mode with frozen masks, because values cannot be read on the meta device."""
    twin = copy.deepcopy(network).eval()
    for masks in masks_of(twin):
        masks.freeze()
    return twin


def _macs(network: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), _nothing_fused(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        network(x.clone())  # a stack runs unused modules once, for their output shapes
        with FlopCounterMode(display=False) as counter:
            network(x)
    flops: int = counter.get_total_flops()
    found, odd = divmod(flops, 2)
    assert not odd, "every product comes with a sum"
    return found


@contextmanager
def _nothing_fused() -> Iterator[None]:
    """Make torch run attention and recurrent layers as matrix products, because the counter misses fused kernels."""
    mha, mkldnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(mha)
        torch.backends.mkldnn.enabled = mkldnn


@contextmanager
def _evaluating(networks: Collection[nn.Module]) -> Iterator[None]:
    """Switch networks to eval mode, and restore the mode of every module afterwards."""
    before = [(network, [(part, part.training) for part in network.modules()]) for network in networks]
    try:
        for network in networks:
            network.eval()
        yield
    finally:
        for network, modes in before:
            network.train(modes[0][1])
            for part, mode in modes:
                part.training = mode


def _check_rounds(variants: Mapping[str, Any], rounds: int, seconds: float, least: int) -> None:
    if not variants:
        raise ConfigError("there are no variants to time; pass at least 1.")
    for name, value in (("rounds", rounds), ("least", least)):
        if integer(name, value) < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more.")
    if not seconds >= 0:
        raise ConfigError(f"seconds is {seconds}; it must be 0 or more.")
