"""Turn real masks into what a forward pass reads: K drawn sources, the top-K, or shares (Algorithm 1, step 1).

Shape letters: T targets, S candidate sources (rows are padded to the longest; `candidate_TS` is False at paddings),
K fan-in.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_SCORE = -1e4
"""The score of a zero entry. It is below the logarithm of every positive float, so zero entries are drawn last (D6)."""


def noisy_scores(
    real_TS: Tensor, candidate_TS: Tensor, *, generator: torch.Generator, temperature: float = 1.0
) -> Tensor:
    """Return log m~ + Gumbel noise; its K `largest` entries are K draws without replacement from Mult(m~).

    Noise is drawn in float64, and for paddings too, so that every draw consumes the same number of random values. With
    a `temperature` T below 1, draws are from Mult(m~^(1/T)). The lower T is, the closer they are to the top-K.
    """
    gumbel_TS = (
        -torch.empty(real_TS.shape, dtype=torch.float64, device=real_TS.device).exponential_(generator=generator).log_()
    )
    log_TS = real_TS.double().log().clamp_(min=MIN_SCORE)
    return (log_TS + temperature * gumbel_TS).masked_fill_(~candidate_TS, -torch.inf)


def largest(score_TS: Tensor, fan_in_T: Tensor) -> Tensor:
    """Activate the `fan_in` largest scores of each row; among equal scores, the first."""
    order_TS = score_TS.argsort(dim=1, descending=True, stable=True)
    chosen_TS = torch.arange(score_TS.shape[1], device=score_TS.device) < fan_in_T[:, None]
    return torch.zeros_like(chosen_TS).scatter_(1, order_TS, chosen_TS)


def shares(
    real_TS: Tensor, candidate_TS: Tensor, fan_in_T: Tensor, *, temperature: float, uniform_floor: float = 0.0
) -> Tensor:
    """Return min(1, c m~^(1/T)) per entry, with c chosen per row so that the row sums to K.

    At temperature 0 this is the top-K, at 1 it is proportional to m~. It is the expectation of drawing K sources with
    these inclusion probabilities. A `uniform_floor` above 0 first spreads that part of m~ evenly over the candidates,
    so that sources whose mask was clipped to 0 are also trained.
    """
    floor_TS = uniform_floor * candidate_TS / candidate_TS.sum(dim=1, keepdim=True)
    log_TS = ((1 - uniform_floor) * real_TS.double() + floor_TS).log().clamp_(min=MIN_SCORE)
    log_TS.masked_fill_(~candidate_TS, -torch.inf)
    whole_TS = torch.zeros_like(candidate_TS)  # entries with a share of 1; the others divide the rest
    while True:
        rest_TS = log_TS.masked_fill(whole_TS, -torch.inf)
        rest_TS = (rest_TS - rest_TS.amax(dim=1, keepdim=True).clamp_min_(MIN_SCORE)).div_(temperature).exp_()
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
