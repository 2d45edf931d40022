"""How masks learn: what a forward pass reads of the real masks, and which gradient updates them (Algorithm 1).

    mc.attach(optimizer, model)                          Draw(): Algorithm 1 as published
    mc.attach(optimizer, model, mc.Blend(steps=1000))    the way that our evidence recommends

Shape letters: T targets, S candidate sources (rows are padded to the longest; a padding is not in `candidate_TS`),
K fan-in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maskconnect.core.budget import Budget, budget_of, check_costs, parameters_of
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, integer, number, shown, unknown_name

if TYPE_CHECKING:
    from maskconnect.core.masks import BinaryMasks, ConnectivityMasks

GRADIENTS = ("plain", "direction", "rms", "none")
CREDITS = ("whole", "new")
UNIFORM_FLOOR = 0.1
"""The default of `Blend.uniform_floor`: enough that no source is given up before its weights have learned."""
NOISE = 1e-6
"""A gradient that differs between candidates by less than this part of its length has no direction but rounding."""
MEMORY = 0.999
"""Of the running mean of squared gradients: the part that a step keeps."""
UNLIKELY = -1e4
"""The score of a zero entry, below the logarithm of every positive float: drawn only when those run out (D6)."""


@dataclass(frozen=True, kw_only=True)
class Learning(ABC):
    """What `Draw` and `Blend` share.

    Args:
        gradient: what the real masks are updated with: "plain", dl/dm as in the paper; "direction", dl/dm less its mean
            over the candidates of a target and scaled to length 1, so that the learning rate is the length of a step;
            "rms", every entry divided by the root mean square of its own gradients so far, as Adam does, then less the
            mean, so that sources with large but contradictory gradients do not decide; or "none", a control in which
            masks never learn.
        credit: what of a source counts for its mask: the "whole" of it, as in the paper, or what is "new" in it,
            without its part along the join of the target. "new" works with the aggregations mean, residual and sum.
        steps: the number of optimizer steps after which the top-K is read, if that is to be.
    """

    gradient: str = "plain"
    credit: str = "whole"
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", _checked_steps(self.steps))
        if self.gradient not in GRADIENTS:
            raise unknown_name("gradient", self.gradient, GRADIENTS)
        if self.credit not in CREDITS:
            raise unknown_name("credit", self.credit, CREDITS)

    @abstractmethod
    def temperature_after(self, steps: int) -> float:
        """1: sources are drawn, or blended, in proportion to the real masks; 0: the top-K is read."""

    @abstractmethod
    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """Step 1 of Algorithm 1: what the next forward pass reads, from the normalised real masks."""

    def priced(self, modules: Sequence[nn.Module], layout: Layout) -> Learning:
        """The same for a stack of these modules; with a budget, what each of them costs."""
        return self

    def budget(self, masks: ConnectivityMasks) -> Budget | None:
        """What the used modules may cost; None where they may cost anything."""
        return None

    def rate_after(self, steps: int) -> float:
        """The part of `mask_lr` by which masks are updated."""
        return 1.0

    def has_ended(self, steps: int) -> bool:
        """Whether masks learned for all `steps`, in the last of which the top-K was read; without `steps`, always."""
        return self.steps is None or steps >= self.steps

    def squares(self, grad_TS: Tensor, before_TS: Tensor) -> Tensor:
        """The running mean of squared gradients after this one; of "rms" only."""
        if self.gradient != "rms":
            return before_TS
        after_TS = before_TS.lerp(grad_TS.square().to(before_TS.dtype), 1 - MEMORY)
        return torch.where(grad_TS.isfinite(), after_TS, before_TS)  # a GradScaler will leave this step out

    def descent(self, grad_TS: Tensor, candidate_TS: Tensor, square_TS: Tensor, steps: int) -> Tensor:
        """What step 3 of Algorithm 1 subtracts from the real masks, but for the learning rate.

        `square_TS` are the `squares` with this gradient, `steps` the number of steps before it.
        """
        if self.gradient == "plain":
            return grad_TS
        if self.gradient == "none":
            return torch.zeros_like(grad_TS)
        candidate_TS = candidate_TS.to(grad_TS.device)
        count_T1 = candidate_TS.sum(dim=1, keepdim=True)
        if self.gradient == "rms":
            usual_TS = (square_TS / (1 - MEMORY ** (steps + 1))).sqrt()
            grad_TS = torch.where(usual_TS > 0, grad_TS / usual_TS, 0.0)
        mean_T1 = grad_TS.sum(dim=1, keepdim=True) / count_T1
        centred_TS = grad_TS - mean_T1 * candidate_TS
        if self.gradient == "rms":
            return centred_TS / count_T1.sqrt()
        length_T1 = centred_TS.norm(dim=1, keepdim=True)
        noise_T1 = NOISE * grad_TS.norm(dim=1, keepdim=True)
        return torch.where(length_T1 > noise_T1, centred_TS / length_T1, 0.0)


@dataclass(frozen=True, kw_only=True)
class Draw(Learning):
    """Algorithm 1 as published: every forward pass reads K sources per target, drawn in proportion to the real mask.

    Args:
        temperature: 1 as in the paper; 0 reads the top-K instead of drawing.
        steps: if given, draws cool down to the top-K over this number of optimizer steps.
        gradient: "plain" (default), "direction", "rms" or "none"; see `Learning`.
        credit: "whole" (default) or "new"; see `Learning`.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "temperature", number("temperature", self.temperature))
        if self.temperature not in (0, 1):
            raise ConfigError(f"temperature is {self.temperature}; it must be 1 (draw) or 0 (read the top-K).")
        if self.steps is not None and not self.temperature:
            raise ConfigError("temperature is 0, which reads the top-K from the start; to cool down, start from 1.")
        if self.gradient == "none" and (self.steps is not None or not self.temperature):
            raise ConfigError(
                "gradient is 'none', a control that draws from uniform masks; use temperature 1 without cooling."
            )

    def temperature_after(self, steps: int) -> float:
        """The temperature of the draws."""
        return self.temperature if self.steps is None else _cooled(steps, self.steps)

    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """K sources per target."""
        temperature = self.temperature_after(masks.steps_taken)
        if not temperature:
            return masks.top(real_TS)
        score_TS = noisy_scores(real_TS, masks.candidate_TS, generator=masks.generator, temperature=temperature)
        return masks.best(score_TS, largest(score_TS, masks.fan_in_T))


@dataclass(frozen=True, kw_only=True)
class Blend(Learning):
    """Every forward pass reads all candidates, each in part; over `steps` the parts become the top-K.

    Args:
        steps: the number of optimizer steps that masks learn for. Freeze after them.
        uniform_floor: this part of each mask is spread evenly over its candidates, so that no source stays untrained.
            By default 0.1, or 0 where `mask_init` favours some sources.
        decay: whether updates of the masks become smaller as the top-K takes over, from `mask_lr` in the first step to
            nothing in the last, so that the last few batches do not decide.
        keep: the part of all parameters that the modules which reach the output may hold when learning ends; 1 lets
            masks choose freely. Learn from a trained network, as `mc.rewire` makes it (see `core/budget.py`).
        costs: with `keep`, one number per module to count in the place of its parameters, such as multiply-adds.
        gradient: "direction" (default), "rms" or "plain"; see `Learning`.
        credit: "whole" (default) or "new"; see `Learning`.
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
            raise ConfigError("gradient is 'none', a control that draws from uniform masks; it cannot blend them.")
        if not isinstance(self.decay, bool):
            raise ConfigError(f"decay is {shown(self.decay)}; it must be True or False.")
        object.__setattr__(self, "keep", number("keep", self.keep))
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be above 0 and at most 1.")
        if self.costs is not None:
            object.__setattr__(self, "costs", _checked_costs(self.costs))

    def temperature_after(self, steps: int) -> float:
        """From 1 down to 0 in a straight line."""
        return _cooled(steps, self.steps)

    def rate_after(self, steps: int) -> float:
        """With `decay` as much as the temperature."""
        return self.temperature_after(steps) if self.decay else 1.0

    def read(self, masks: ConnectivityMasks, real_TS: Tensor) -> BinaryMasks:
        """All candidates, each in part."""
        if not self.temperature_after(masks.steps_taken):
            return masks.top(real_TS)
        top_TS = masks.top(real_TS, within_budget=False).mask_TS
        return masks.blended(self.shares(masks, masks.swapped_to(top_TS, real_TS)), top_TS)

    def shares(self, masks: ConnectivityMasks, real_TS: Tensor) -> Tensor:
        """What a pass reads of each candidate while the temperature is above 0."""
        temperature = self.temperature_after(masks.steps_taken)
        budget = self.budget(masks)
        if budget is not None and budget.alone:
            share_TS = shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=1.0)
            most = budget.most_after(masks.steps_taken / self.steps)
            share_TS = budget.rows_like(budget.sharpened(budget.matrix(share_TS), temperature, most), share_TS)
            normalize_(share_TS, masks.candidate_TS)
            return share_TS
        floor = default_floor(masks.decay) if self.uniform_floor is None else self.uniform_floor
        return shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=temperature, uniform_floor=floor)

    def priced(self, modules: Sequence[nn.Module], layout: Layout) -> Blend:
        """With a budget: the same with the parameters of each module as costs, unless costs are given."""
        if self.keep == 1:
            return self
        if layout.all_out:
            raise ConfigError("keep is below 1, but the output of aggregation='stream' reads every module.")
        costs = parameters_of(modules) if self.costs is None else self.costs
        check_costs(costs, len(modules))
        return replace(self, costs=costs)

    def budget(self, masks: ConnectivityMasks) -> Budget | None:
        """What the used modules may cost; None without a budget."""
        if self.keep == 1 or self.costs is None:
            return None
        return budget_of(masks.layout, masks.candidates, tuple(masks.fan_in_T.tolist()), self.costs, self.keep)


def default_floor(decay: float) -> float:
    """The uniform floor of masks that start with this ratio from each candidate to the next nearer one."""
    return UNIFORM_FLOOR if decay == 1 else 0.0


def to_plain(how: Learning) -> dict[str, Any]:
    """A way to learn as plain data, for JSON."""
    return {"way": type(how).__name__.lower()} | {each.name: getattr(how, each.name) for each in fields(how)}


def from_plain(data: dict[str, Any]) -> Learning:
    """The inverse of `to_plain`."""
    kinds: dict[str, type[Learning]] = {"draw": Draw, "blend": Blend}
    kind = kinds[data["way"]]
    return kind(**{name: value for name, value in data.items() if name != "way"})


def check_credit(credit: str, aggregation: Any) -> None:
    """`credit="new"` needs an aggregation that adds up sources."""
    if credit == "new" and aggregation not in ("mean", "residual", "sum"):
        raise ConfigError("credit is 'new'; it works with the aggregations mean, residual and sum only.")


def noisy_scores(
    real_TS: Tensor, candidate_TS: Tensor, *, generator: torch.Generator, temperature: float = 1.0
) -> Tensor:
    """log m~ + Gumbel noise: its K `largest` are distributed exactly as K draws without replacement from Mult(m~).

    Noise is drawn in float64 and for paddings too, so that every draw consumes the same number of random values. With a
    `temperature` T below 1 draws are those from Mult(m~^(1/T)), the nearer to the top-K the lower it is.
    """
    gumbel_TS = (
        -torch.empty(real_TS.shape, dtype=torch.float64, device=real_TS.device).exponential_(generator=generator).log_()
    )
    log_TS = real_TS.double().log().clamp_(min=UNLIKELY)
    return (log_TS + temperature * gumbel_TS).masked_fill_(~candidate_TS, -torch.inf)


def largest(score_TS: Tensor, fan_in_T: Tensor) -> Tensor:
    """Activate the `fan_in` largest scores of each row; of equal ones, the first."""
    order_TS = score_TS.argsort(dim=1, descending=True, stable=True)
    chosen_TS = torch.arange(score_TS.shape[1], device=score_TS.device) < fan_in_T[:, None]
    return torch.zeros_like(chosen_TS).scatter_(1, order_TS, chosen_TS)


def shares(
    real_TS: Tensor, candidate_TS: Tensor, fan_in_T: Tensor, *, temperature: float, uniform_floor: float = 0.0
) -> Tensor:
    """min(1, c m~^(1/T)) of every entry, with c such that a row adds up to K: at 0 the top-K, at 1 in proportion to m~.

    This is the expectation of drawing K sources with these inclusion probabilities. A `uniform_floor` above 0 first
    spreads that part of m~ evenly over the candidates, so that sources whose mask was clipped to 0 are trained too.
    """
    floor_TS = uniform_floor * candidate_TS / candidate_TS.sum(dim=1, keepdim=True)
    log_TS = ((1 - uniform_floor) * real_TS.double() + floor_TS).log().clamp_(min=UNLIKELY)
    log_TS.masked_fill_(~candidate_TS, -torch.inf)
    whole_TS = torch.zeros_like(candidate_TS)  # those with a share of 1; what is left goes to the others
    while True:
        rest_TS = log_TS.masked_fill(whole_TS, -torch.inf)
        rest_TS = (rest_TS - rest_TS.amax(dim=1, keepdim=True).clamp_min_(UNLIKELY)).div_(temperature).exp_()
        left_T1 = fan_in_T[:, None] - whole_TS.sum(dim=1, keepdim=True)
        share_TS = left_T1 * rest_TS / rest_TS.sum(dim=1, keepdim=True).clamp_min_(1)
        over_TS = share_TS >= 1
        if not over_TS.any():
            return share_TS.masked_fill_(whole_TS, 1)
        whole_TS |= over_TS


def normalize_(real_TS: Tensor, candidate_TS: Tensor) -> None:
    """Make every row sum to 1, in place; a row of zeros becomes uniform over its candidates (D6)."""
    total_T1 = real_TS.sum(dim=1, keepdim=True)
    uniform_TS = candidate_TS / candidate_TS.sum(dim=1, keepdim=True)
    real_TS.copy_(torch.where(total_T1 > 0, real_TS / total_T1, uniform_TS.to(real_TS.dtype)))


def _cooled(taken: int, steps: int) -> float:
    """A temperature that goes from 1 to 0 in a straight line: it is 1 in the first of `steps` and 0 in the last."""
    way = max(1, steps - 1)
    return 1.0 - min(taken, way) / way


def _checked_steps(steps: Any) -> int:
    if integer("steps", steps) < 1:
        raise ConfigError(
            f"steps is {steps}; it must be the number of optimizer steps that masks learn for, 1 or more."
        )
    return integer("steps", steps)


def _checked_costs(costs: Any) -> tuple[float, ...]:
    if not isinstance(costs, Sequence) or isinstance(costs, str):
        raise ConfigError(f"costs is {shown(costs)}; it must be a list with one number per module.")
    found = tuple(number("a cost", cost) for cost in costs)
    if not all(0 <= cost < math.inf for cost in found):
        raise ConfigError(f"costs has {min(found)}; each must be a finite number of 0 or more.")
    return found
