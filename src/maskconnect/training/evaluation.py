"""Evaluate the network of a run: after an epoch, at the freeze and at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from maskconnect.core.lookup import masks_of
from maskconnect.training.diagnostics import activation_scales
from maskconnect.training.images import Prepared
from maskconnect.training.norms import reestimate_, statistics_kept
from maskconnect.training.options import Machine
from maskconnect.training.predictions import Predictions, evaluating, predict
from maskconnect.training.ranks import ALONE, Ranks

SCALES_BY = 256 * 32**2
"""The largest number of pixels used for the scales of activations, because every rank holds all of them."""

Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A network, and the images that it is evaluated on."""

    network: nn.Module
    images: Prepared
    machine: Machine
    reestimate: int  # batches to re-estimate batch-norm statistics of drawn masks with (D11)
    check: Callable[[], None]  # called before each batch; may raise
    ranks: Ranks = ALONE

    @property
    def learning(self) -> bool:
        """Whether masks are still being learned."""
        return not all(masks.is_frozen for masks in masks_of(self.network))

    def epoch(self) -> Found:
        """Return the scores of the validation set, if any, and of the test set; of the top-K while masks learn."""
        parts = ("validation", "test") if self.images.validation is not None else ("test",)
        if not (self.learning and self.reestimate):
            return {part: self.scores(part) for part in parts}
        with statistics_kept(self.network):
            self.reestimate_()
            return {part: self.scores(part) for part in parts}

    def predictions(self) -> Predictions:
        """Return the predictions for the test set."""
        return predict(self.network, self.images.test, self.machine, self.check, self.ranks)

    def validation(self) -> Found | None:
        """Return the scores of the validation set, if there is one."""
        return None if self.images.validation is None else self.scores("validation")

    def scores(self, part: str) -> Found:
        """Return loss, top-1 and top-5 of a set."""
        batches = self.images.test if part == "test" else self.images.validation
        assert batches is not None
        return asdict(predict(self.network, batches, self.machine, self.check, self.ranks).scores())

    def scales(self) -> list[float | None]:
        """Return the scales of activations for the first images of the test set; every rank gets the same."""
        test = self.images.test
        few = min(test.size, max(1, SCALES_BY // test.plan.size**2))
        x, _ = next(iter(replace(test, size=few, rank=0, ranks=1).epoch(0)))
        with evaluating(self.network):
            return activation_scales(self.network, self.machine.ready(x))

    def reestimate_(self) -> None:
        """Re-estimate batch-norm statistics for the top-K or frozen wiring (D11)."""
        reestimate_(self.network, self.images.train, self.reestimate, self.machine, self.check, self.ranks)
