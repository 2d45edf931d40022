"""Training steps of one case, timed in turn: plain, frozen wiring, learning.

A step is forward, backward, and the update of weights and masks. Each network has the memory layout in which it is
faster, so that the comparison is with the best that a plain network can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.bench.cases import CLASSES, Case
from maskconnect.core.loop import attach, masks_of, param_groups
from maskconnect.ship.measure import Times, interleaved

VARIANTS = ("plain", "frozen", "learning")
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
SIDE = 32


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the steps of one case took at one batch size."""

    batch: int
    layouts: Mapping[str, str]  # of each variant
    times: Mapping[str, Times]

    def describe(self) -> dict[str, Any]:
        """All of it as plain data: seconds of each variant, and ratios with their spread."""
        pairs = (("frozen", "plain"), ("learning", "plain"), ("learning", "frozen"))
        ratios = {f"{a}_over_{b}": self._ratio(a, b) for a, b in pairs}
        seconds = {
            name: {"minimum": times.minimum, "median": times.median, "rounds": len(times.seconds)}
            for name, times in self.times.items()
        }
        return {"batch": self.batch, "layouts": dict(self.layouts), "seconds": seconds, "ratios": ratios}

    def _ratio(self, a: str, b: str) -> dict[str, float]:
        pairs = zip(self.times[a].seconds, self.times[b].seconds, strict=True)
        each = sorted(mine / theirs for mine, theirs in pairs)
        found = self.times[a].over(self.times[b])
        return {"minima": found.minima, "median": found.rounds, "lowest": each[0], "highest": each[-1]}


def time_steps(case: Case, batch: int, *, seconds: float, rounds: int = 100) -> Result:
    """Time a step of every variant, interleaved, in at most about so many seconds."""
    chosen = {name: _faster(case, name, batch) for name in VARIANTS}
    steps = {name: step for name, (_, step) in chosen.items()}
    times = interleaved(steps, rounds, seconds, least=3)
    return Result(batch=batch, layouts={name: layout for name, (layout, _) in chosen.items()}, times=times)


def _faster(case: Case, variant: str, batch: int) -> tuple[str, Callable[[], None]]:
    """A step in the layout in which it is faster."""
    steps = {name: training_step(make(case, variant), batch, layout) for name, layout in LAYOUTS.items()}
    times = interleaved(steps, 2, 0.0, least=2)
    best = min(times, key=lambda name: times[name].minimum)
    return best, steps[best]


def make(case: Case, variant: str) -> nn.Module:
    """The network of a variant, always with the same weights."""
    torch.manual_seed(0)
    if variant == "plain":
        return case.plain()
    return case.network("learned" if variant == "learning" else "random")


def training_step(network: nn.Module, batch: int, layout: torch.memory_format) -> Callable[[], None]:
    """A step of SGD on the same images, again and again."""
    network.train().to(memory_format=layout)  # type: ignore[call-overload]
    x, y = images(batch, layout)
    groups: Sequence[Any] = list(network.parameters())
    if masks_of(network):
        groups = param_groups(network, lr=0.01, mask_lr=0.01, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4)
    attach(optimizer, network)

    def step() -> None:
        F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def images(batch: int, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """Noise of the size of CIFAR, and classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, SIDE, SIDE, generator=generator).contiguous(memory_format=layout)
    return x, torch.randint(CLASSES, (batch,), generator=generator)
