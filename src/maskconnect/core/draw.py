"""`mc.Draw`: every forward pass draws K sources per target (Algorithm 1 as published).

Shape letters: T targets, S candidate sources, K fan-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from maskconnect.core.learning import Learning, linear_cooling
from maskconnect.core.sampling import largest, noisy_scores
from maskconnect.errors import ConfigError, number

if TYPE_CHECKING:
    from maskconnect.core.binary import BinaryMasks
    from maskconnect.core.masks import ConnectivityMasks


@dataclass(frozen=True, kw_only=True)
class Draw(Learning):
    """Learn masks by Algorithm 1 as published: every forward pass draws K sources per target from the real mask.

    Args:
        temperature: 1 (default) draws sources, as in the paper; 0 reads the top-K instead.
        steps: cool the draws down to the top-K over this number of optimizer steps; None (default) never cools.
        gradient: "plain" (default), "direction", "rms" or "none"; see `Learning.gradient`.
        credit: "whole" (default) or "new"; see `Learning.credit`.
        images: about how many images of a batch each mask gradient uses; None (default) for all.

    Raises:
        ConfigError: if an option is out of range, or options contradict each other.

    Example:
        ```python
        optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.3), momentum=0.9)
        mc.attach(optimizer, model, mc.Draw(steps=10_000))
        ```
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "temperature", number("temperature", self.temperature))
        if self.temperature not in (0, 1):
            raise ConfigError(f"temperature is {self.temperature}; it must be 1 (draw) or 0 (read the top-K).")
        if self.steps is not None and not self.temperature:
            raise ConfigError(
                "temperature is 0, so there is nothing to cool down. Set temperature=1, or leave out steps."
            )
        if self.gradient == "none" and (self.steps is not None or not self.temperature):
            raise ConfigError(
                "gradient is 'none', a control that draws from uniform masks; set temperature=1 and leave out steps."
            )

    def temperature_after(self, steps: int) -> float:
        """Return the temperature of the draws."""
        return self.temperature if self.steps is None else linear_cooling(steps, self.steps)

    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """Draw K sources per target."""
        temperature = self.temperature_after(masks.steps_taken)
        if not temperature:
            return masks.top(real_TS)
        score_TS = noisy_scores(real_TS, masks.candidate_TS, generator=masks.generator, temperature=temperature)
        return masks.best(score_TS, largest(score_TS, masks.fan_in_T))
