"""Search for the wiring within a budget that loses least of the real masks.

In a set of modules that stay, every target reads its K best. A set is possible if it contains all outputs, and K
sources for each of its targets. The search starts with all modules and removes one module at a time; it keeps the best
BEAM sets of each size. In small stacks these are all sets, so the search is exact.

Shape letters: B sets of modules, M modules, T targets, S candidate sources (the preferred first).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskconnect.core.budget import ROUNDING, Budget

BEAM = 64
"""The number of sets of each size that the search continues with, in small stacks."""
LARGEST = 4_000_000
"""The number of values that a search holds at a time: stacks with many modules have a narrower beam."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A wiring, what it loses of the real masks, and the cost of its used modules."""

    mask_TS: Tensor
    lost: float
    cost: float


def fit(real_TS: Tensor, budget: Budget, preferred_first_TS: Tensor, most: float) -> Fit:
    """Return the best wiring that costs at most `most`; the cheapest wiring if there is none."""
    search = _Search(real_TS, budget, preferred_first_TS)
    kept_BM = torch.ones(1, len(budget.cost_M), dtype=torch.bool, device="cpu")
    best: tuple[bool, float, float] | None = None
    while len(kept_BM):
        used_BM, chosen_BTS, lost_B, cost_B = search.outcome(kept_BM)
        for b, (lost, cost) in enumerate(zip(lost_B.tolist(), cost_B.tolist(), strict=True)):
            fits = cost <= most + ROUNDING
            rank = (not fits, lost if fits else cost, -cost)
            if best is None or rank < best:
                best, found = rank, Fit(search.mask(used_BM[b], chosen_BTS[b]), lost, cost)
        further_B = search.narrowed(lost_B, cost_B)
        kept_BM = search.smaller(kept_BM[further_B], used_BM[further_B])
    return found


def smallest_cost(budget: Budget, preferred_first_TS: Tensor) -> float:
    """Return the smallest part of all costs that a wiring can have."""
    return fit(torch.zeros_like(preferred_first_TS, dtype=torch.float64), budget, preferred_first_TS, -1.0).cost


class _Search:
    def __init__(self, real_TS: Tensor, budget: Budget, preferred_first_TS: Tensor) -> None:
        self.budget, self.order_TS, self.first = budget, preferred_first_TS, budget.layout.targets.start
        width = real_TS.shape[1]
        rows = [list(budget.candidates[target]) for target in budget.layout.targets]
        source_TS = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device="cpu").reshape(-1, width)
        self.source_TS = source_TS.gather(1, self.order_TS)
        self.value_TS = real_TS.double().gather(1, self.order_TS)
        self.fan_in_T = torch.tensor(budget.fan_in, device="cpu")
        self.top_T = self.chosen(torch.ones(1, len(budget.cost_M), dtype=torch.bool, device="cpu"))[1][0]
        self.beam = max(1, min(BEAM, LARGEST // (len(budget.cost_M) * real_TS.numel() + 1)))

    def present(self, kept_BM: Tensor) -> Tensor:
        """Return which candidates stay."""
        return kept_BM[:, self.source_TS.clamp_min(0)] & (self.source_TS >= 0)

    def chosen(self, kept_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K best remaining candidates of each target, and the sum of their values."""
        value_BTS = torch.where(self.present(kept_BM), self.value_TS, -torch.inf)
        order_BTS = value_BTS.argsort(dim=2, descending=True, stable=True)
        first_TS = torch.arange(value_BTS.shape[2], device="cpu") < self.fan_in_T[:, None]
        chosen_BTS = torch.zeros_like(value_BTS, dtype=torch.bool).scatter_(2, order_BTS, first_TS.expand_as(order_BTS))
        return chosen_BTS, torch.where(chosen_BTS, value_BTS, 0.0).sum(dim=2)

    def outcome(self, kept_BM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, per set, the used modules, the chosen sources, the loss of mask values and the cost."""
        chosen_BTS, value_BT = self.chosen(kept_BM)
        used_BM = torch.zeros_like(kept_BM)
        used_BM[:, list(self.budget.layout.outputs)] = True
        for target in reversed(self.budget.layout.targets):
            row_S = self.source_TS[target - self.first]
            reads_BS = chosen_BTS[:, target - self.first, row_S >= 0] & used_BM[:, target, None]
            used_BM[:, row_S[row_S >= 0]] |= reads_BS
        lost_B = torch.where(used_BM[:, self.first :], self.top_T - value_BT, 0.0).sum(dim=1)
        return used_BM, chosen_BTS, lost_B, used_BM.double() @ self.budget.cost_M

    def narrowed(self, lost_B: Tensor, cost_B: Tensor) -> Tensor:
        """Return the sets to continue with: those that lose least, and the cheapest."""
        order_B = cost_B.argsort(stable=True)
        by_loss_B = order_B[lost_B[order_B].argsort(stable=True)][: self.beam]
        return torch.cat([by_loss_B, order_B[:1]])

    def smaller(self, kept_BM: Tensor, used_BM: Tensor) -> Tensor:
        """Return all possible sets without one of the used modules, and without modules that then lack sources."""
        kept_BM = (kept_BM[:, None] & ~torch.eye(kept_BM.shape[1], dtype=torch.bool, device="cpu")).flatten(0, 1)
        kept_BM = kept_BM[(used_BM & self.budget.removable_M).flatten()]
        for target in self.budget.layout.targets:
            row_S = self.source_TS[target - self.first]
            sources_B = kept_BM[:, row_S[row_S >= 0]].sum(dim=1)
            kept_BM[:, target] &= sources_B >= self.fan_in_T[target - self.first]
        found: Tensor = torch.unique(kept_BM[kept_BM[:, list(self.budget.layout.outputs)].all(dim=1)], dim=0)
        return found

    def mask(self, used_M: Tensor, chosen_TS: Tensor) -> Tensor:
        """Return a complete wiring; targets that are not used read their best candidates."""
        every_TS = self.chosen(torch.ones_like(used_M)[None])[0][0]
        mask_TS = torch.where(used_M[self.first :, None], chosen_TS, every_TS)
        return torch.zeros_like(mask_TS).scatter_(1, self.order_TS, mask_TS)
