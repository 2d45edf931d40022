"""The course of learning, for the callbacks of all libraries: attach, freeze, report metrics, draw."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maskconnect.core.draw import Draw
from maskconnect.core.learning import Learning
from maskconnect.core.lookup import freeze, masks_of, wiring_of
from maskconnect.core.metrics import metrics
from maskconnect.core.optim import attach
from maskconnect.errors import ConfigError, integer
from maskconnect.report.drawing import KINDS, draw


@dataclass(kw_only=True)
class Course:
    """The options of a callback, and the wiring at its last report.

    Args:
        how: `mc.Draw()`, the default, or `mc.Blend(steps=N)`.
        mask_lr: the learning rate of the masks; None if the optimizer was created with `mc.param_groups`.
        freeze_at: the optimizer step after which masks are frozen. By default, when `how` has taken its `steps`.
        freeze_at_epoch: the number of epochs after which masks are frozen, instead of `freeze_at`.
        drawing: a file for the wiring at the end of training, .svg or .png.
    """

    how: Learning | None = None
    mask_lr: float | None = None
    freeze_at: int | None = None
    freeze_at_epoch: int | None = None
    drawing: str | os.PathLike[str] | None = None
    last_wiring: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.freeze_at is not None and self.freeze_at_epoch is not None:
            raise ConfigError("freeze_at and freeze_at_epoch are both set; leave one out.")
        for name in ("freeze_at", "freeze_at_epoch"):
            value = getattr(self, name)
            if value is not None and integer(name, value) < 0:
                raise ConfigError(f"{name} is {value}; it must be 0 or more.")
        if self.drawing is not None and Path(self.drawing).suffix.lower() not in KINDS:  # before hours of training
            raise ConfigError(f"draw is {str(self.drawing)!r}; it must end in {' or '.join(KINDS)}.")

    def begin(self, optimizer: Optimizer, model: nn.Module, *, step: int, epoch: float) -> None:
        """Attach the masks; call this after loading a checkpoint, if there is one."""
        attach(optimizer, model, self.how, mask_lr=self.mask_lr)
        self.last_wiring = wiring_of(model)
        self.after_step(model, step=step, epoch=epoch)

    def after_step(self, model: nn.Module, *, step: int, epoch: float) -> None:
        """Freeze the masks if learning is over."""
        if any(not masks.is_frozen for masks in masks_of(model)) and self.is_over(model, step=step, epoch=epoch):
            freeze(model)

    def is_over(self, model: nn.Module, *, step: int, epoch: float) -> bool:
        """Return whether masks have learned for as long as they should."""
        if self.freeze_at is not None:
            return step >= self.freeze_at
        if self.freeze_at_epoch is not None:
            return epoch >= self.freeze_at_epoch
        how = Draw() if self.how is None else self.how
        taken = [masks.steps_taken for masks in masks_of(model) if not masks.is_frozen]
        return how.steps is not None and how.has_ended(min(taken))

    def report(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of the masks, with the changes since the last call."""
        found = metrics(model, self.last_wiring)
        self.last_wiring = wiring_of(model)
        return found

    def end(self, model: nn.Module) -> None:
        """Draw the wiring, if requested."""
        if self.drawing is not None:
            Path(self.drawing).parent.mkdir(parents=True, exist_ok=True)
            draw(model, self.drawing)
