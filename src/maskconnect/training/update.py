"""The updates of a run: one optimizer step per batch, and what to do if a loss is not finite (Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from maskconnect.core.optim import advance
from maskconnect.errors import MaskConnectError, ReportedElsewhereError
from maskconnect.recipes.schema import Recipe
from maskconnect.training.diagnostics import scales_in_words
from maskconnect.training.norms import average_statistics_, statistics
from maskconnect.training.options import Machine, Options
from maskconnect.training.progress import Silent
from maskconnect.training.ranks import Ranks, averaged
from maskconnect.training.schedule import Schedule, nonfinite
from maskconnect.training.state import State
from maskconnect.training.step import Step, gradients

SMALLEST_SCALE = 1e-4
"""The smallest scale at which fp16 may skip steps with infinite gradients; it starts at 65536 and is halved."""


@dataclass(kw_only=True)
class Updates:
    """Runs the optimizer steps of one process."""

    recipe: Recipe
    how: Options
    machine: Machine
    network: nn.Module
    state: State
    schedule: Schedule
    show: Silent
    ranks: Ranks
    _forward: nn.Module | None = field(default=None, init=False)  # the network as called in training
    _learning: bool = field(default=False, init=False)  # whether masks learned when it was made

    def wrapped(self, *, learning: bool) -> nn.Module:
        """Return the network as called in training: averaged over ranks, and compiled if requested and frozen."""
        if self._forward is None or learning != self._learning:  # frozen masks have no gradient
            forward = averaged(self.network) if self.ranks.count > 1 else self.network
            if self.how.compile and not learning:  # with dynamic shapes, the first batch size would matter
                forward = cast(nn.Module, torch.compile(forward, dynamic=False))
            self._forward, self._learning = forward, learning
        return self._forward

    def step(self, forward: nn.Module, x: Tensor, y: Tensor, count: int) -> Step:
        """Run Algorithm 1 for one batch; `mc.attach` updates and clips the masks after the optimizer's step.

        `count` is the number of images in the batch on all ranks; x and y are those of this rank.
        """
        optimizer, scaler, parts = self.state.optimizer, self.state.scaler, self.recipe.training.accumulate
        before = [buffer.clone() for buffer in statistics(self.network)] if self.how.skip_nonfinite else []
        step = gradients(
            forward, optimizer, x, y, parts=parts, machine=self.machine, scaler=scaler, ranks=self.ranks, images=count
        )
        average_statistics_(self.network, self.ranks)
        scaling = scaler is not None and scaler.get_scale() > SMALLEST_SCALE  # the scaler will find a scale that works
        if not math.isfinite(step.loss) or not (scaling or math.isfinite(step.gradient)):
            self.report_nonfinite(step, x)
            for buffer, value in zip(statistics(self.network), before, strict=True):
                buffer.copy_(value)
            self.state.skipped += 1
            advance(self.network)
            return Step(loss=0.0, correct=0, images=0, gradient=0.0)
        if scaler is None:
            optimizer.step()
        else:  # it skips the step if gradients have overflowed
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                advance(self.network)
        return step

    def report_nonfinite(self, step: Step, x: Tensor) -> None:
        """Say where the loss was not finite; an error, unless such batches are skipped."""
        what, phase = nonfinite(step, self.schedule), self.schedule.phase
        if self.how.skip_nonfinite:
            self.show.line(f"{what}; skipping this batch")
            return
        scales = scales_in_words(self.network, self.machine.ready(x))
        kind = MaskConnectError if self.ranks.first else ReportedElsewhereError
        raise kind(
            f"{what}. The scales of activations, layer by layer: {scales}. Restart with a lower "
            f"phase.{phase.name}.lr (--set, --fresh), or skip such batches with --skip-nonfinite."
        )
