"""Sums over steps, for the means that metrics report."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskconnect.training.step import Step


@dataclass
class Tally:
    """What some steps came to, together."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # of these seconds, for images

    def add(self, step: Step, seconds: float, waited: float = 0.0) -> None:
        """Count one more step, which took so long, part of it for want of images."""
        self.loss += step.loss * step.images
        self.correct += step.correct
        self.images += step.images
        self.steps += 1
        self.seconds += seconds
        self.waited += waited

    def means(self) -> dict[str, float]:
        """Loss and accuracy (in %) of an image, how fast images went, and how much of the time (in %) none was there.

        Of no image, no number.
        """
        speed = self.images / self.seconds if self.seconds else 0.0
        return {
            "loss": self.loss / self.images if self.images else math.nan,
            "accuracy": 100 * self.correct / self.images if self.images else math.nan,
            "images_per_second": round(speed, 1),
            "waiting_for_data": round(100 * self.waited / self.seconds, 2) if self.seconds else 0.0,
        }
