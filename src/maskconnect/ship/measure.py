"""What a network costs: multiply-accumulates and time.

A multiply-accumulate (MAC) is one product and one sum, as papers count them: half of the FLOPs of torch's counter.
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
"""Rounds before the first that counts: a frozen stack learns in its first pass which modules it need not run."""


def macs(network: nn.Module, example: Tensor | Sequence[int]) -> int:
    """The multiply-accumulates of one forward pass in eval mode, for one input.

    `example` is a batch, of which the first counts, or the shape of one input: `macs(network, (3, 32, 32))`.
    Convolutions, matrix products and attention count; norms, activations and sums do not. Of a stack only the modules
    that can reach its output count, as only they run. The network itself does not change.
    """
    x = _one_input(network, example)
    try:
        return _macs(_settled_copy(network).to("meta"), x.to("meta"))
    except Exception:  # it looks at values, say, or holds tensors that are no buffers; its own mistakes come again
        return _macs(_settled_copy(network), x)


@dataclass(frozen=True)
class Ratio:
    """How many times as long one thing takes as another."""

    minima: float  # of the fastest rounds
    rounds: float  # the median over the ratios of each round: the one to report, as noise moves it least


@dataclass(frozen=True)
class Times:
    """What one of several interleaved variants took, in seconds."""

    seconds: tuple[float, ...]  # of every round

    @property
    def minimum(self) -> float:
        """Of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Over all rounds."""
        return statistics.median(self.seconds)

    def over(self, other: Times) -> Ratio:
        """How many times as long as `other`, which was timed in the same rounds."""
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
    """Time callables in turn, A B C A B C and so on, so that what slows the machine down slows all of them down.

    There are up to `rounds` rounds, after a warm-up; fewer if another would go beyond `seconds` in all, but `least`.
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
    """The time that networks take for the batch x, interleaved, in eval and inference mode; their modes stay."""

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
    """A batch of one."""
    if isinstance(example, Tensor):
        return example[:1].detach().clone()
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(()))
    return torch.zeros(1, *(integer("a length of example", n) for n in example), dtype=like.dtype, device=like.device)


def _settled_copy(network: nn.Module) -> nn.Module:
    """A copy in eval mode whose masks are frozen as eval mode reads them, since on meta they cannot be looked at."""
    twin = copy.deepcopy(network).eval()
    for masks in masks_of(twin):
        masks.freeze()
    return twin


def _macs(network: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), _nothing_fused(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        network(x.clone())  # a stack runs modules that it does not need once, for their output shapes
        with FlopCounterMode(display=False) as counter:
            network(x)
    flops: int = counter.get_total_flops()
    found, odd = divmod(flops, 2)
    assert not odd, "every product comes with a sum"
    return found


@contextmanager
def _nothing_fused() -> Iterator[None]:
    """Let torch run attention and recurrent layers as matrix products: of fused kernels the counter sees nothing."""
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
    """All networks in eval mode, and afterwards every module in the mode that it was in."""
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
        raise ConfigError("there is nothing to time; give at least 1 variant.")
    for name, value in (("rounds", rounds), ("least", least)):
        if integer(name, value) < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more.")
    if not seconds >= 0:
        raise ConfigError(f"seconds is {seconds}; it must be 0 or more.")
