"""Sums over steps, from which metrics report means."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskconnect.training.step import Step


@dataclass
class Tally:
    """The sums over several steps."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these spent waiting for images

    def add(self, step: Step, seconds: float, waited: float = 0.0) -> None:
        """Add one step, the seconds that it took, and the seconds of these spent waiting for images."""
        self.loss += step.loss * step.images
        self.correct += step.correct
        self.images += step.images
        self.steps += 1
        self.seconds += seconds
        self.waited += waited

    def means(self) -> dict[str, float]:
        """Return the mean loss, the accuracy in %, images per second, and the time spent waiting for data in %.

        Without any images, loss and accuracy are not a number.
        """
        speed = self.images / self.seconds if self.seconds else 0.0
        return {
            "loss": self.loss / self.images if self.images else math.nan,
            "accuracy": 100 * self.correct / self.images if self.images else math.nan,
            "images_per_second": round(speed, 1),
            "waiting_for_data": round(100 * self.waited / self.seconds, 2) if self.seconds else 0.0,
        }
