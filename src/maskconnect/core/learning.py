"""The options that `Draw` and `Blend` share, and the gradient that updates masks (Algorithm 1, step 3).

    mc.attach(optimizer, model)                          Draw(): Algorithm 1 as published
    mc.attach(optimizer, model, mc.Blend(steps=1000))    recommended by our experiments

Shape letters: T targets, S candidate sources (rows are padded to the longest; `candidate_TS` is False at paddings).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maskconnect.core.budget import Budget
from maskconnect.core.host import on_device
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, integer, unknown_name

if TYPE_CHECKING:
    from maskconnect.core.binary import BinaryMasks
    from maskconnect.core.masks import ConnectivityMasks

GRADIENTS = ("plain", "direction", "rms", "none")
CREDITS = ("whole", "new")
NOISE = 1e-6
"""If the gradients of a target's candidates differ by less than this part of their length, the rest is rounding."""
RMS_DECAY = 0.999
"""The part of the running mean of squared gradients that a step keeps."""


@dataclass(frozen=True, kw_only=True)
class Learning(ABC):
    """Options that `Draw` and `Blend` share."""

    gradient: str = "plain"
    """How the gradient dl/dm updates the real masks.

    - "plain": dl/dm, as in the paper.
    - "direction": dl/dm minus its mean over the candidates of a target, scaled to length 1, so that the learning rate
      is the length of a step.
    - "rms": each entry divided by the root mean square of its past gradients, as in Adam, then centered. Sources with
      large but contradictory gradients no longer decide.
    - "none": masks never learn; a control for experiments.
    """

    credit: str = "whole"
    """The part of a source that counts for its mask: the "whole" source, as in the paper, or only what is "new" in it,
    without its component along the input of the target. "new" needs the aggregation "mean", "residual" or "sum"."""

    steps: int | None = None
    """The number of optimizer steps after which a pass reads the top-K; None for never."""

    images: int | None = None
    """About how many evenly spaced images of a batch each mask gradient uses; None for all, as in the paper.

    Fewer images take less time in large batches; peak memory stays the same. This applies to the aggregations "mean",
    "sum", "residual" and "stream". Other aggregations, ResNeXt and compiled steps always use all images."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", _checked_steps(self.steps))
        if self.images is not None and integer("images", self.images) < 1:
            raise ConfigError(f"images is {self.images}; it must be 1 or more, or None for all images of a batch.")
        if self.gradient not in GRADIENTS:
            raise unknown_name("gradient", self.gradient, GRADIENTS)
        if self.credit not in CREDITS:
            raise unknown_name("credit", self.credit, CREDITS)

    @abstractmethod
    def temperature_after(self, steps: int) -> float:
        """Return 1 to draw or blend sources in proportion to the real masks, 0 to read the top-K."""

    @abstractmethod
    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """Choose what the next forward pass reads, from normalized real masks (Algorithm 1, step 1)."""

    def priced(self, modules: Sequence[nn.Module], layout: Layout) -> Learning:
        """Return these options for a stack of `modules`; with a budget, the cost of each module is filled in."""
        return self

    def budget(self, masks: ConnectivityMasks) -> Budget | None:
        """Return the limit on the cost of the used modules; None if there is no limit."""
        return None

    def rate_after(self, steps: int) -> float:
        """Return the fraction of `mask_lr` that is used after this number of steps."""
        return 1.0

    def has_ended(self, steps: int) -> bool:
        """Return whether masks have learned for all `steps`, so that the last pass read the top-K."""
        return self.steps is None or steps >= self.steps

    def squares(self, grad_TS: Tensor, before_TS: Tensor) -> Tensor:
        """Return the running mean of squared gradients after this gradient; only "rms" updates it."""
        if self.gradient != "rms":
            return before_TS
        after_TS = before_TS.lerp(grad_TS.square().to(before_TS.dtype), 1 - RMS_DECAY)
        return torch.where(grad_TS.isfinite(), after_TS, before_TS)  # a GradScaler will skip this step

    def descent(self, grad_TS: Tensor, candidate_TS: Tensor, square_TS: Tensor, steps: int) -> Tensor:
        """Return what step 3 of Algorithm 1 subtracts from the real masks, before the learning rate is applied.

        Args:
            grad_TS: dl/dm.
            candidate_TS: True at candidates, False at paddings.
            square_TS: the result of `squares` with this gradient.
            steps: the number of steps before this one.
        """
        if self.gradient == "plain":
            return grad_TS
        if self.gradient == "none":
            return torch.zeros_like(grad_TS)
        candidate_TS = on_device(candidate_TS, grad_TS.device)
        count_T1 = candidate_TS.sum(dim=1, keepdim=True)
        if self.gradient == "rms":
            usual_TS = (square_TS / (1 - RMS_DECAY ** (steps + 1))).sqrt()
            grad_TS = torch.where(usual_TS > 0, grad_TS / usual_TS, 0.0)
        mean_T1 = grad_TS.sum(dim=1, keepdim=True) / count_T1
        centered_TS = grad_TS - mean_T1 * candidate_TS
        if self.gradient == "rms":
            return centered_TS / count_T1.sqrt()
        length_T1 = centered_TS.norm(dim=1, keepdim=True)
        noise_T1 = NOISE * grad_TS.norm(dim=1, keepdim=True)
        return torch.where(length_T1 > noise_T1, centered_TS / length_T1, 0.0)


def linear_cooling(taken: int, steps: int) -> float:
    """Return a temperature that falls linearly: 1 in the first of `steps`, 0 in the last."""
    last = max(1, steps - 1)
    return 1.0 - min(taken, last) / last


def check_credit(credit: str, aggregation: Any) -> None:
    """Raise an error if `credit="new"` is combined with an aggregation that does not add sources."""
    if credit == "new" and aggregation not in ("mean", "residual", "sum"):
        raise ConfigError("credit is 'new'; it works with the aggregations mean, residual and sum only.")


def _checked_steps(steps: Any) -> int:
    if integer("steps", steps) < 1:
        raise ConfigError(
            f"steps is {steps}; it must be the number of optimizer steps that masks learn for, 1 or more."
        )
    return integer("steps", steps)
