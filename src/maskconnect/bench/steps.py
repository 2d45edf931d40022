"""Training steps of one case, timed in turn, and what they compute, move and hold.

    plain       a plain network (`plain.py`)
    frozen      random wiring of the same fan-in
    learning    masks and weights
    blending    the same with all candidates read in part, where K of them are drawn otherwise
    reference   learning in the readable way (`core/reference.py`)
    lean        ResNeXt: learning, with wide tensors made again rather than kept

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

from maskconnect.bench.arithmetic import Arithmetic, count
from maskconnect.bench.cases import CLASSES, Case
from maskconnect.core.learning import Blend
from maskconnect.core.lookup import masks_of
from maskconnect.core.optim import attach, param_groups
from maskconnect.core.reference import reference
from maskconnect.models import save_memory_
from maskconnect.ship.measure import Times, interleaved

LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
SIDE = 32
LONG = 10**9
"""Steps over which blended masks become the top-K: far more than are measured."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the steps of one case took at one batch size."""

    batch: int
    layouts: Mapping[str, str]  # of each variant
    times: Mapping[str, Times]
    arithmetic: Mapping[str, Arithmetic]

    def describe(self) -> dict[str, Any]:
        """All of it as plain data: seconds of each variant, and ratios with their spread."""
        pairs = [(name, "plain") for name in self.times if name != "plain"] + [("learning", "frozen")]
        ratios = {f"{a}_over_{b}": self._ratio(a, b) for a, b in pairs}
        seconds = {
            name: {"minimum": times.minimum, "median": times.median, "rounds": len(times.seconds)}
            for name, times in self.times.items()
        }
        counted = {name: arithmetic.describe() for name, arithmetic in self.arithmetic.items()}
        return {
            "batch": self.batch,
            "layouts": dict(self.layouts),
            "seconds": seconds,
            "ratios": ratios,
            "arithmetic": counted,
        }

    def memory(self, variant: str) -> float:
        """How many times as much as a plain step a variant holds at its peak."""
        return self.arithmetic[variant].peak / self.arithmetic["plain"].peak

    def _ratio(self, a: str, b: str) -> dict[str, float]:
        pairs = zip(self.times[a].seconds, self.times[b].seconds, strict=True)
        each = sorted(mine / theirs for mine, theirs in pairs)
        found = self.times[a].over(self.times[b])
        return {"minima": found.minima, "median": found.rounds, "lowest": each[0], "highest": each[-1]}


def time_steps(case: Case, batch: int, *, seconds: float, rounds: int = 100) -> Result:
    """Time a step of every variant, interleaved, in at most about so many seconds, and count what it does."""
    chosen = {name: _faster(case, name, batch) for name in case.variants}
    steps = {name: step for name, (_, step) in chosen.items()}
    times = interleaved(steps, rounds, seconds, least=3)
    layouts = {name: layout for name, (layout, _) in chosen.items()}
    return Result(batch=batch, layouts=layouts, times=times, arithmetic=count_steps(case, batch, case.variants))


def count_steps(case: Case, batch: int, variants: Sequence[str]) -> dict[str, Arithmetic]:
    """What a step of some variants computes, moves and holds; counted on the meta device."""
    layout = LAYOUTS["channels first"]
    return {name: count(step_of(case, name, batch, layout, device="meta")) for name in variants}


def _faster(case: Case, variant: str, batch: int) -> tuple[str, Callable[[], None]]:
    """A step in the layout in which it is faster."""
    steps = {name: step_of(case, variant, batch, layout) for name, layout in LAYOUTS.items()}
    times = interleaved(steps, 2, 0.0, least=2)
    best = min(times, key=lambda name: times[name].minimum)
    return best, steps[best]


def step_of(
    case: Case, variant: str, batch: int, layout: torch.memory_format, device: str = "cpu"
) -> Callable[[], None]:
    """A training step of one variant."""
    step = training_step(make(case, variant).to(device), batch, layout)
    if variant != "reference":
        return step

    def readable() -> None:
        with reference():
            step()

    return readable


def make(case: Case, variant: str) -> nn.Module:
    """The network of a variant, always with the same weights."""
    torch.manual_seed(0)
    if variant == "plain":
        return case.plain()
    network = case.network("random" if variant == "frozen" else "learned")
    if variant == "lean":
        save_memory_(network)
    if variant == "blending":
        for masks in masks_of(network):
            masks.learn_by(Blend(steps=LONG))
    return network


def training_step(network: nn.Module, batch: int, layout: torch.memory_format) -> Callable[[], None]:
    """A step of SGD on the same images, again and again."""
    network.train().to(memory_format=layout)  # type: ignore[call-overload]
    x, y = (part.to(next(network.parameters()).device) for part in images(batch, layout))
    groups: Sequence[Any] = list(network.parameters())
    if masks_of(network):
        groups = param_groups(network, lr=0.01, mask_lr=0.01, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4)
    for masks in masks_of(network)[:1]:
        attach(optimizer, network, masks.how)

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
