"""The position in a run, and the work that is left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from maskconnect.recipes.schema import Phase, Recipe
from maskconnect.training.progress import Progress
from maskconnect.training.state import Position
from maskconnect.training.step import Step


@dataclass(kw_only=True)
class Schedule:
    """The epochs of all phases, one after the other."""

    recipe: Recipe
    batches: int  # per epoch
    position: Position
    _since: tuple[int, int, float] | None = field(
        default=None, init=False
    )  # phase, step and time of the first call in a phase

    @property
    def phase(self) -> Phase:
        """The current phase; at the end of a run, the last one."""
        return self.recipe.phase[min(self.position.phase, len(self.recipe.phase) - 1)]

    @property
    def title(self) -> str:
        """The title of the current phase, for people."""
        name = f"phase {self.position.phase + 1}/{len(self.recipe.phase)}"
        return f"{name}, learning" if self.recipe.learns and self.phase.mask_lr else name

    @property
    def epoch(self) -> int:
        """The number of the current epoch in the run, from 0; at the end of a run, that of the last one."""
        before = sum(phase.epochs for phase in self.recipe.phase[: self.position.phase])
        return min(before + self.position.epoch, self.recipe.epochs - 1)

    @property
    def steps(self) -> int:
        """The number of steps in the run."""
        return self.recipe.epochs * self.batches

    @property
    def last_of_phase(self) -> bool:
        """Whether the current epoch is the last one of its phase."""
        return self.position.epoch + 1 == self.phase.epochs

    @property
    def evaluated(self) -> bool:
        """Whether the current epoch ends with an evaluation."""
        every = self.recipe.training.evaluate_every
        if not every:
            return self.epoch + 1 == self.recipe.epochs
        return self.last_of_phase or (self.epoch + 1) % every == 0

    def labels(self) -> dict[str, Any]:
        """Return the phase, epoch, step and learning rates for a line of metrics."""
        masks = self.phase.mask_lr if self.recipe.learns else 0.0
        place = {"phase": self.phase.name, "epoch": self.epoch + 1, "step": self.position.step}
        return place | {"lr": self.phase.lr, "mask_lr": masks}

    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the steps of this phase so far, with evaluation; None at the first."""
        now, position = time.monotonic(), self.position
        if self._since is None or self._since[0] != position.phase:
            self._since = position.phase, position.step, now
        taken = position.step - self._since[1]
        return (now - self._since[2]) / taken * (self.steps - position.step) if taken else None

    def progress(self, means: dict[str, float]) -> Progress:
        """Return the progress of the run; `means` are those of the current epoch."""
        return Progress(
            phase=self.title,
            epoch=self.epoch + 1,
            epochs=self.recipe.epochs,
            step=self.position.step,
            steps=self.steps,
            seconds_left=self.seconds_left(),
            **means,
        )


def nonfinite(step: Step, schedule: Schedule) -> str:
    """Return a description of what is not finite in a step, and where in the run it happened."""
    phase = schedule.phase
    what = f"the loss is {step.loss}" if not math.isfinite(step.loss) else "a gradient is not finite"
    rates = f"lr {phase.lr}, mask_lr {phase.mask_lr}"
    return f"{what} at step {schedule.position.step} (phase {phase.name}, epoch {schedule.epoch + 1}, {rates})"
