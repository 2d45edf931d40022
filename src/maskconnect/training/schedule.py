"""Where in a run one is, and how much of it is left."""

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
    batches: int  # of an epoch
    position: Position
    _since: tuple[int, int, float] | None = field(default=None, init=False)  # phase, step and time of its first look

    @property
    def phase(self) -> Phase:
        """The present phase; at the end of a run, the last one."""
        return self.recipe.phase[min(self.position.phase, len(self.recipe.phase) - 1)]

    @property
    def title(self) -> str:
        """What a person calls the present phase."""
        name = f"phase {self.position.phase + 1}/{len(self.recipe.phase)}"
        return f"{name}, learning" if self.recipe.learns and self.phase.mask_lr else name

    @property
    def epoch(self) -> int:
        """The number of the present epoch in the whole run, from 0; at its end, that of the last one."""
        before = sum(phase.epochs for phase in self.recipe.phase[: self.position.phase])
        return min(before + self.position.epoch, self.recipe.epochs - 1)

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.recipe.epochs * self.batches

    @property
    def last_of_phase(self) -> bool:
        """Whether the present epoch is the last of its phase."""
        return self.position.epoch + 1 == self.phase.epochs

    @property
    def evaluated(self) -> bool:
        """Whether the present epoch ends with an evaluation."""
        every = self.recipe.training.evaluate_every
        if not every:
            return self.epoch + 1 == self.recipe.epochs
        return self.last_of_phase or (self.epoch + 1) % every == 0

    def labels(self) -> dict[str, Any]:
        """What a line of metrics is of."""
        masks = self.phase.mask_lr if self.recipe.learns else 0.0
        place = {"phase": self.phase.name, "epoch": self.epoch + 1, "step": self.position.step}
        return place | {"lr": self.phase.lr, "mask_lr": masks}

    def seconds_left(self) -> float | None:
        """By what steps of the present phase took so far in this process, evaluation and all (None at its first)."""
        now, position = time.monotonic(), self.position
        if self._since is None or self._since[0] != position.phase:
            self._since = position.phase, position.step, now
        taken = position.step - self._since[1]
        return (now - self._since[2]) / taken * (self.steps - position.step) if taken else None

    def progress(self, means: dict[str, float]) -> Progress:
        """How far the run is; `means` are those of the present epoch."""
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
    """What is not finite in a step, and where in the run that is."""
    phase = schedule.phase
    what = f"the loss is {step.loss}" if not math.isfinite(step.loss) else "a gradient is not finite"
    rates = f"lr {phase.lr}, mask_lr {phase.mask_lr}"
    return f"{what} at step {schedule.position.step} (phase {phase.name}, epoch {schedule.epoch + 1}, {rates})"
