"""The part of a mask update that enforces a budget: worth of modules before a step, limit after it (D16)."""

from __future__ import annotations

import torch
from torch import Tensor

from maskconnect.core.blend import Blend
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.sampling import normalize_, shares


def worth_of_modules(masks: ConnectivityMasks, grad_TS: Tensor) -> Tensor | None:
    """Return the worth of each module to the loss; None without a budget, or if the pass read the top-K."""
    how, budget = masks.how, masks.how.budget(masks)
    if budget is None or not isinstance(how, Blend) or not how.temperature_after(masks.steps_taken):
        return None
    share_TS = how.shares(masks, masks.real.detach().cpu())
    return budget.worth(budget.matrix(share_TS), budget.matrix(grad_TS))


def only_removes(masks: ConnectivityMasks) -> bool:
    """Return whether the used modules determine the wiring, so that the usual mask step would only add noise."""
    budget = masks.how.budget(masks)
    return budget is not None and budget.single_source


def apply_budget_(masks: ConnectivityMasks, worth_M: Tensor | None, lr: float) -> None:
    """Bring the real masks within the budget of this step, in place; without a budget, do nothing."""
    how, budget = masks.how, masks.how.budget(masks)
    if budget is None or how.steps is None:
        return
    real_TS = masks.real.detach().to("cpu", torch.float64, copy=True)
    normalize_(real_TS, masks.candidate_TS)
    share_TS = shares(real_TS, masks.candidate_TS, masks.fan_in_T, temperature=1.0)
    gain_M = torch.zeros_like(budget.cost_M) if worth_M is None else lr * worth_M
    held_MM = budget.step(budget.matrix(share_TS), gain_M, budget.limit_after(masks.steps_taken / how.steps))
    real_TS = budget.rows_like(held_MM, real_TS)
    normalize_(real_TS, masks.candidate_TS)
    masks.real.copy_(real_TS)
