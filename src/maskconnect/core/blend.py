"""`mc.Blend`: every forward pass reads a weighted mix of all candidates, whose weights concentrate on the top-K.

Shape letters: T targets, S candidate sources, K fan-in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from maskconnect.core.budget import Budget, budget_of, check_costs, parameters_of
from maskconnect.core.learning import Learning, linear_cooling
from maskconnect.core.sampling import normalize_, shares
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, number, shown

if TYPE_CHECKING:
    from maskconnect.core.binary import BinaryMasks
    from maskconnect.core.masks import ConnectivityMasks

UNIFORM_FLOOR = 0.1
"""The default of `Blend.uniform_floor`: enough that no source is dropped before its weights have learned."""


@dataclass(frozen=True, kw_only=True)
class Blend(Learning):
    """Learn masks by blending: every pass reads a weighted mix of all candidates.

    Over `steps` the weights of the mix concentrate on the top-K.

    Args:
        steps: the number of optimizer steps that masks learn for (required). Call `mc.freeze` after them.
        uniform_floor: the fraction of each mask that is spread evenly over its candidates, so that every source is
            trained. None (default) means 0.1, or 0 if `mask_init` prefers some sources.
        decay: whether mask updates shrink linearly, from `mask_lr` in the first step to 0 in the last, so that the last
            few batches do not decide. False by default.
        keep: the fraction of the stack's parameters that modules in use may hold when learning ends. 1 (default) sets
            no limit. Below 1, start from a trained network, such as one from `mc.rewire`.
        costs: with `keep`, one number per module that replaces its number of parameters, such as its multiply-adds.
            None (default) counts parameters.
        gradient: "direction" (default), "rms" or "plain"; see `Learning.gradient`.
        credit: "whole" (default) or "new"; see `Learning.credit`.
        images: about how many images of a batch each mask gradient uses; None (default) for all.

    Raises:
        ConfigError: if an option is out of range.

    Example:
        ```python
        optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.03), momentum=0.9)
        mc.attach(optimizer, model, mc.Blend(steps=1000))
        # ... 1000 optimizer steps ...
        mc.freeze(model)
        ```
    """

    steps: int = field()
    uniform_floor: float | None = None
    decay: bool = False
    keep: float = 1.0
    costs: tuple[float, ...] | None = None
    gradient: str = "direction"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uniform_floor is not None:
            object.__setattr__(self, "uniform_floor", number("uniform_floor", self.uniform_floor))
            if not 0 <= self.uniform_floor < 1:
                raise ConfigError(f"uniform_floor is {self.uniform_floor}; it must be at least 0 and below 1.")
        if self.gradient == "none":
            raise ConfigError(
                "gradient is 'none', a control that draws from uniform masks; it cannot blend them. Use mc.Draw."
            )
        if not isinstance(self.decay, bool):
            raise ConfigError(f"decay is {shown(self.decay)}; it must be True or False.")
        object.__setattr__(self, "keep", number("keep", self.keep))
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be above 0 and at most 1.")
        if self.costs is not None:
            object.__setattr__(self, "costs", _checked_costs(self.costs))

    def temperature_after(self, steps: int) -> float:
        """Return a temperature that falls linearly from 1 to 0."""
        return linear_cooling(steps, self.steps)

    def rate_after(self, steps: int) -> float:
        """Return the temperature with `decay`, otherwise 1."""
        return self.temperature_after(steps) if self.decay else 1.0

    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """Read a weighted mix of all candidates."""
        if not self.temperature_after(masks.steps_taken):
            return masks.top(real_TS)
        top_TS = masks.top(real_TS, within_budget=False).mask_TS
        return masks.blended(self.shares(masks, masks.swapped_to(top_TS, real_TS)), top_TS)

    def shares(self, masks: ConnectivityMasks, real_TS: Tensor) -> Tensor:
        """Return the weight of each candidate in the mix while the temperature is above 0."""
        temperature = self.temperature_after(masks.steps_taken)
        budget = self.budget(masks)
        if budget is not None and budget.single_source:
            share_TS = shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=1.0)
            limit = budget.limit_after(masks.steps_taken / self.steps)
            share_TS = budget.rows_like(budget.sharpened(budget.matrix(share_TS), temperature, limit), share_TS)
            normalize_(share_TS, masks.candidate_TS)
            return share_TS
        floor = default_floor(masks.decay) if self.uniform_floor is None else self.uniform_floor
        return shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=temperature, uniform_floor=floor)

    def priced(self, modules: Sequence[nn.Module], layout: Layout) -> Blend:
        """Return these options with the cost of each module: its number of parameters, unless `costs` are given."""
        if self.keep == 1:
            return self
        if layout.all_out:
            raise ConfigError(
                f"keep is {self.keep}, but the output of aggregation='stream' reads every module, so none can be "
                "removed; set keep=1, or choose another aggregation."
            )
        costs = parameters_of(modules) if self.costs is None else self.costs
        check_costs(costs, len(modules))
        return replace(self, costs=costs)

    def budget(self, masks: ConnectivityMasks) -> Budget | None:
        """Return the limit on the cost of the used modules; None if `keep` is 1."""
        if self.keep == 1 or self.costs is None:
            return None
        return budget_of(masks.layout, masks.candidates, tuple(masks.fan_in_T.tolist()), self.costs, self.keep)


def default_floor(decay: float) -> float:
    """Return the default uniform floor; `decay` is the initial ratio from each candidate to the next nearer one."""
    return UNIFORM_FLOOR if decay == 1 else 0.0


def _checked_costs(costs: Any) -> tuple[float, ...]:
    if not isinstance(costs, Sequence) or isinstance(costs, str):
        raise ConfigError(f"costs is {shown(costs)}; it must be a list with one number per module.")
    found = tuple(number("a cost", cost) for cost in costs)
    wrong = [cost for cost in found if not 0 <= cost < math.inf]
    if wrong:
        raise ConfigError(f"costs has {wrong[0]}; each must be a finite number of 0 or more.")
    return found
