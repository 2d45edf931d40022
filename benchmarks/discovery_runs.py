"""One run of a row of `discovery.py`: a recipe, or an alternative to its masks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from discovery_alternatives import Relaxed, left_out
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core.count import pruned_parameters
from maskconnect.models import build
from maskconnect.recipes import Recipe, load
from maskconnect.training import images
from maskconnect.training.images import Prepared
from maskconnect.training.options import Options, prepare
from maskconnect.training.predictions import predict

PHASES = ("learn", "freeze", "fine", "finer")
HELD_OUT = 4
"""The number of validation batches with which `left_out` chooses."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a network is trained."""

    variant: str = ""  # of the recipe
    relax: str | None = None  # "softmax" or "gumbel" instead of masks
    rate: float = 0.0  # of Adam, for the relaxed choices
    halfway: bool = False  # freeze when masks are halfway between reading everything and reading the top-K
    leave_out: bool = False  # choose sources by leaving each out, not by the size of masks
    mask_lr: float | None = None  # instead of that of the recipe
    settings: tuple[str, ...] = ()  # further changes of the recipe


ROWS = {
    "Learned": Row(),
    "Learned by draws, as in the paper": Row(variant="-drawn"),
    "Fixed-Prev: a chain of 3x3": Row(variant="-prev"),
    "Fixed-Random": Row(variant="-random"),
    "Fixed-Full": Row(variant="-full"),
    "Fixed-Full, a learned scale each": Row(variant="-scaled"),
    "Softmax (DARTS), top-K": Row(relax="softmax", rate=0.03),
    "Gumbel top-K": Row(relax="gumbel", rate=0.03),
    "Learned, chosen by leaving out": Row(halfway=True, leave_out=True),
}


def epochs(*counts: int) -> tuple[str, ...]:
    """Return the settings that give each phase of a quick recipe (4, 4, 1, 1) this number of epochs."""
    return tuple(f"phase.{name}.epochs={count}" for name, count in zip(PHASES, counts, strict=True))


LONGER, THREE = epochs(6, 6, 2, 1), epochs(12, 12, 3, 3)
"""1.5 times and three times the epochs of a quick recipe."""

TRIED = {
    "Learned, frozen halfway": Row(halfway=True),
    "Softmax (DARTS), chosen by leaving out": Row(relax="softmax", rate=0.03, leave_out=True),
    "Fixed-Prev, 1.5 times the epochs": Row(variant="-prev", settings=LONGER),
    "Fixed-Random, 1.5 times the epochs": Row(variant="-random", settings=LONGER),
    "Learned, 3 times the epochs": Row(settings=THREE),
    "Fixed-Prev, 3 times the epochs": Row(variant="-prev", settings=THREE),
    "Fixed-Random, 3 times the epochs": Row(variant="-random", settings=THREE),
    "Fixed-Full, a learned scale each, 3 times the epochs": Row(variant="-scaled", settings=THREE),
    **{f"Softmax, rate {rate}": Row(relax="softmax", rate=rate) for rate in (0.003, 0.01, 0.1)},
    **{f"Gumbel, rate {rate}": Row(relax="gumbel", rate=rate) for rate in (0.003, 0.01, 0.1)},
    **{f"Learned, mask rate {rate}": Row(mask_lr=rate) for rate in (0.003, 0.01, 0.1)},
    "Learned by direction": Row(settings=("learning.gradient=direction",)),
    "Learned by direction, credit new": Row(settings=("learning.gradient=direction", "learning.credit=new")),
    "Learned, no decay": Row(settings=("learning.decay=none",)),
    "Learned, K=4": Row(settings=("model.fan_in=4",)),
    "Learned, a learned scale each": Row(settings=("model.aggregation=scaled",)),
    "Learned, K=4, a learned scale each": Row(settings=("model.fan_in=4", "model.aggregation=scaled")),
    "Fixed-Random, K=4, a learned scale each": Row(
        variant="-random", settings=("model.fan_in=4", "model.aggregation=scaled")
    ),
}
"""Controls, and settings that were tried; research/discovery.md says which were chosen with seeds from 100."""


def train(name: str, settings: tuple[str, ...], row: Row, seed: int, how: Options) -> dict[str, Any]:
    """Train one network as its recipe says; return the result."""
    recipe = load(name + row.variant, [f"seed={seed}", *settings, *row.settings])
    machine = prepare(how)
    given = images.prepare(recipe, how, machine.device)
    start = time.perf_counter()
    torch.manual_seed(seed)
    network = build(recipe.model.spec(num_classes=len(given.classes), in_channels=given.channels, seed=seed))
    steps = recipe.steps_of_learning(len(given.train))
    fan_in = recipe.model.fan_in or 0  # fixed wirings need none
    relaxed = Relaxed(cast(mc.MaskedStack, network.stack), fan_in, row.relax, steps) if row.relax else None
    if relaxed is not None:
        network.stack = relaxed
    cast(Any, network).to(memory_format=torch.channels_last)
    optimizers = optimizers_of(network, recipe, row, relaxed, steps)
    first = 0
    for phase in recipe.phase:
        if not phase.mask_lr:
            choose(network, row, relaxed, fan_in, given)
            relaxed = None
            optimizers[1:] = []
        optimizers[0].param_groups[0]["lr"] = phase.lr
        for epoch in range(first, first + phase.epochs):
            for x, y in given.train.epoch(epoch):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                with machine.autocast():
                    loss = F.cross_entropy(network(machine.ready(x)), y)
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
                if relaxed is not None:
                    relaxed.taken += 1
        first += phase.epochs
    seconds = time.perf_counter() - start
    parts = {"validation": given.validation, "test": given.test}
    scores = {p: predict(network, part, machine, lambda: None).scores().top1 for p, part in parts.items() if part}
    left = pruned_parameters(network).transitive
    return {**scores, "seconds": round(seconds, 1), "parameters": left, "wiring": mc.wiring_of(network)}


def optimizers_of(
    network: nn.Module, recipe: Recipe, row: Row, relaxed: Relaxed | None, steps: int
) -> list[torch.optim.Optimizer]:
    """Return SGD for weights and masks, and Adam for relaxed choices."""
    training, (mask_lr, *_) = recipe.training, [phase.mask_lr for phase in recipe.phase]
    if relaxed is not None:
        weights = [p for name, p in network.named_parameters() if name != "stack.alpha"]
        sgd = torch.optim.SGD(weights, lr=0.0, momentum=training.momentum, weight_decay=training.weight_decay)
        return [sgd, torch.optim.Adam([relaxed.alpha], lr=row.rate, betas=(0.5, 0.999), weight_decay=1e-3)]
    rate = mask_lr if row.mask_lr is None else row.mask_lr
    groups = mc.param_groups(network, lr=0.0, mask_lr=rate, weight_decay=training.weight_decay)
    sgd = torch.optim.SGD(groups, momentum=training.momentum)
    mc.attach(sgd, network, recipe.learning.how(2 * steps if row.halfway else steps))
    return [sgd]


def choose(network: nn.Module, row: Row, relaxed: Relaxed | None, fan_in: int, given: Prepared) -> None:
    """Make the wiring final, if it is not."""
    stack = network.stack
    if isinstance(stack, mc.MaskedStack) and (stack.masks.is_frozen or not row.leave_out):
        mc.freeze(network)
        return
    if relaxed is None:
        assert isinstance(stack, mc.MaskedStack)
        masks = stack.masks
        relaxed = Relaxed(stack, fan_in, "softmax", 1)
        weight_TS = masks.how.read(masks, masks.real.detach().clone()).mask_TS.float() / fan_in
        network.stack = relaxed
    else:
        weight_TS = relaxed.alpha.detach().softmax(dim=1)
    value_TS = weight_TS
    if row.leave_out:
        assert given.validation is not None
        value_TS = left_out(network, relaxed, weight_TS, list(islice(given.validation.epoch(0), HELD_OUT)))
    network.stack = relaxed.cut(value_TS)
