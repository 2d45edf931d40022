"""Draw binary masks from real-valued ones (Algorithm 1, step 1), all targets in one call.

Shape letters: T targets, S candidate sources (rows are padded to the longest; a padding is not in
`candidate_TS`), K fan-in.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = -1e4
"""The score of a zero entry, below the logarithm of every positive float: drawn only when those run out (D6)."""


def noisy_scores(
    real_TS: Tensor, candidate_TS: Tensor, *, generator: torch.Generator, temperature: float = 1.0
) -> Tensor:
    """log m~ + Gumbel noise: its K `largest` are distributed exactly as K draws without replacement from Mult(m~).

    Noise is drawn in float64 and for paddings too, so that a draw always takes as many numbers. With a
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


def shares(real_TS: Tensor, candidate_TS: Tensor, fan_in_T: Tensor, *, temperature: float, even: float = 0.0) -> Tensor:
    """min(1, c m~^(1/T)) of every entry, with c such that a row adds up to K: at 0 the top-K, at 1 in proportion to m~.

    Draws of K in which every source has this chance are what the blend is the mean of. Where `even` is above 0, that
    part of m~ is spread evenly over the candidates first: those whose mask was clipped to 0 are read, and trained, too.
    """
    even_TS = even * candidate_TS / candidate_TS.sum(dim=1, keepdim=True)
    log_TS = ((1 - even) * real_TS.double() + even_TS).log().clamp_(min=UNLIKELY)
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


def cooled(first: float, last: float, done: int, steps: int) -> float:
    """A temperature on its straight way from the first of so many steps to the last, where it stays."""
    way = max(1, steps - 1)
    return first + (last - first) * min(done, way) / way
