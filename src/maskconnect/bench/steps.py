"""Time the training steps of one case in turn, and count what they compute, move and hold.

    plain       a plain network (`plain.py`)
    frozen      random wiring of the same fan-in
    learning    masks and weights
    blending    the same, with all candidates read instead of K that are drawn
    reference   learning with the reference implementation (`core/reference.py`)
    lean        ResNeXt: learning, with wide tensors recomputed in the backward pass instead of kept

A step is forward, backward, and the update of weights and masks. Each network is timed in the fastest of its forms
(`forms.py`), so that the baseline is the best that a plain network can do; `reference` and `lean` have the form of
`learning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.bench.arithmetic import Arithmetic, count
from maskconnect.bench.cases import CLASSES, Case
from maskconnect.bench.forms import COUNTED, Form
from maskconnect.core.blend import Blend
from maskconnect.core.draw import Draw
from maskconnect.core.lookup import masks_of
from maskconnect.core.optim import attach, param_groups
from maskconnect.core.reference import reference
from maskconnect.models import save_memory_
from maskconnect.ship.measure import Times, interleaved

SIDE = 32
LONG = 10**9
"""Steps over which blended masks become the top-K: far more than are timed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The time and the counts of the steps of one case at one batch size."""

    batch: int
    forms: Mapping[str, Form]  # of each variant
    times: Mapping[str, Times]
    arithmetic: Mapping[str, Arithmetic]

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain data: the seconds of each variant, and ratios with their spread."""
        pairs = [(name, "plain") for name in self.times if name != "plain"]
        pairs += [("learning", "frozen")] * ("frozen" in self.times)
        ratios = {f"{a}_over_{b}": self._ratio(a, b) for a, b in pairs}
        seconds = {
            name: {"minimum": times.minimum, "median": times.median, "rounds": len(times.seconds)}
            for name, times in self.times.items()
        }
        counted = {name: arithmetic.describe() for name, arithmetic in self.arithmetic.items()}
        return {
            "batch": self.batch,
            "forms": {name: asdict(form) for name, form in self.forms.items()},
            "seconds": seconds,
            "ratios": ratios,
            "arithmetic": counted,
            "memory_over_plain": {name: self.memory(name) for name in counted if name != "plain"},
            "operations_over_plain": {name: self.operations(name) for name in counted if name != "plain"},
        }

    def memory(self, variant: str) -> float:
        """Return the peak memory of a variant, as a multiple of a plain step."""
        return self.arithmetic[variant].peak / self.arithmetic["plain"].peak

    def operations(self, variant: str) -> float:
        """Return the number of operations of a variant, as a multiple of a plain step."""
        return self.arithmetic[variant].operations / self.arithmetic["plain"].operations

    def _ratio(self, a: str, b: str) -> dict[str, float]:
        pairs = zip(self.times[a].seconds, self.times[b].seconds, strict=True)
        each = sorted(mine / theirs for mine, theirs in pairs)
        found = self.times[a].over(self.times[b])
        return {"minima": found.minima, "median": found.rounds, "lowest": each[0], "highest": each[-1]}


def time_steps(
    case: Case, batch: int, *, seconds: float, rounds: int = 100, variants: Sequence[str] | None = None
) -> Result:
    """Time a step of every variant, interleaved, for about `seconds` at most, and count its operations.

    Finding the fastest form takes up to a fifth of `seconds` more per variant, and at least a few steps.
    """
    variants = case.variants if variants is None else variants
    chosen: dict[str, tuple[Form, Callable[[], None]]] = {}
    for name in variants:
        forms = (chosen["learning"][0],) if name in ("reference", "lean") else case.forms
        chosen[name] = _fastest(case, name, batch, forms, seconds / 5)
    times = interleaved({name: step for name, (_, step) in chosen.items()}, rounds, seconds, least=3)
    return Result(
        batch=batch,
        forms={name: form for name, (form, _) in chosen.items()},
        times=times,
        arithmetic=count_steps(case, batch, variants, device="cpu"),
    )


def count_steps(case: Case, batch: int, variants: Sequence[str], device: str = "meta") -> dict[str, Arithmetic]:
    """Count what a step of each variant computes, moves, holds and launches.

    The meta device computes nothing, skips a few checks of the masks, and does not fuse attention.
    """
    return {name: count(step_of(case, name, batch, COUNTED, device)) for name in variants}


def _fastest(
    case: Case, variant: str, batch: int, forms: Sequence[Form], seconds: float
) -> tuple[Form, Callable[[], None]]:
    """Return a step in its fastest form."""
    steps = {form: step_of(case, variant, batch, form) for form in forms}
    if len(steps) > 1:
        times = interleaved({str(form): step for form, step in steps.items()}, 20, seconds, least=2)
        best = min(steps, key=lambda form: times[str(form)].minimum)
    else:
        (best,) = steps
    return best, steps[best]


def step_of(case: Case, variant: str, batch: int, form: Form, device: str = "cpu") -> Callable[[], None]:
    """Return a training step of one variant."""
    step = training_step(make(case, variant).to(device), batch, form)
    if variant != "reference":
        return step

    def reference_step() -> None:
        with reference():
            step()

    return reference_step


def make(case: Case, variant: str) -> nn.Module:
    """Build the network of a variant, always with the same weights."""
    torch.manual_seed(0)
    if variant == "plain":
        return case.plain()
    network = case.network("random" if variant == "frozen" else "learned")
    if variant == "lean":
        save_memory_(network)
    how = Blend(steps=LONG, images=case.images) if variant == "blending" else Draw(images=case.images)
    for masks in masks_of(network):
        masks.learn_by(how)
    return network


def training_step(network: nn.Module, batch: int, form: Form) -> Callable[[], None]:
    """Return an SGD step that uses the same images every time."""
    form.network(network.train())
    device = next(network.parameters()).device
    x, y = (part.to(device) for part in images(batch))
    x = form.images(x)
    groups: Sequence[Any] = list(network.parameters())
    if masks_of(network):
        groups = param_groups(network, lr=0.01, mask_lr=0.01, weight_decay=1e-4)
    optimizer = form.optimizer(groups)
    for masks in masks_of(network)[:1]:
        attach(optimizer, network, masks.how)

    def step() -> None:
        F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def images(batch: int) -> tuple[Tensor, Tensor]:
    """Return noise of the size of CIFAR images, and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, SIDE, SIDE, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)
