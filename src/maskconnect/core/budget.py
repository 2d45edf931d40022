"""Learn what to remove: a wiring whose used modules hold at most a part of all costs (`mc.Blend(steps=N, keep=0.6)`).

From the shares s_jk that target j reads of module k, and from the outputs back, follows how much each module is used:

    u_k = sum_j s_jk u_j                  exact where each target reads one source; u = 1 for the outputs
    u_k = 1 - prod_j (1 - s_jk u_j)       otherwise, as if the readers chose independently

To use k less by a part r, all its readers read in its place, in that part, what k itself reads; no other use changes:

    s_j <- s_j + r s_jk (s_k / K_k - e_k)

The gradient by the masks tells what that does to the loss: dl/dr of module k. Its square is the worth w_k of a module
(the Fisher information of a gate in its place, as in pruning by Taylor expansion). Every step moves all uses to

    u_k <- clip(u_k + lr w_k - lambda c_k, 0, 1)

with the smallest lambda >= 0 at which sum_k c_k u_k is within the budget of that step. A module that is used less is
worth less, so uses go to 0 or 1. Where each target of a chain reads one source, a pass reads these uses at temperature
1 and, at 0, the most used modules that the budget allows, as a whole.

Shape letters: M modules (MM: reader, source), T targets, S candidate sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConfigError

SETTLED = 0.7
"""After this part of the steps the budget is `keep`; before, it goes down from 1 in a straight line."""
MOST_PRESSURE = 1e9
"""Where the search for lambda gives up: modules that may not go cost more than the budget of a step."""
ROUNDING = 1e-9
"""By how much costs may exceed a budget because sums are rounded."""


class Budget:
    """What the used modules of a stack may cost. Stacks of one kind share one: `budget_of`.

    Args:
        fan_in: K of every target.
        costs: of every module.
        keep: the part of all costs that may be used in the end.
    """

    def __init__(
        self, layout: Layout, candidates: Sources, fan_in: Sequence[int], costs: Sequence[float], keep: float
    ) -> None:
        self.layout, self.candidates, self.fan_in, self.keep = layout, candidates, tuple(fan_in), keep
        first, modules = layout.targets.start, range(len(costs))
        stays = [*layout.outputs, *([] if layout.layered else [0])]
        self.cost_M = _host(costs) / _host(costs).sum()
        self.fan_in_M1 = _host([1.0] * first + list(map(float, fan_in)))[:, None]
        self.may_MM = torch.stack([_host([float(k in row) for k in modules]) for row in map(set, candidates)])
        self.removable_M = _host([float(k not in stays) for k in modules]).bool()
        self.alone = len(layout.outputs) == 1 and set(fan_in) <= {1}  # each module has one reader at a time

    def most_after(self, progress: float) -> float:
        """The budget after this part of the steps."""
        return 1 - (1 - self.keep) * min(1.0, progress / SETTLED)

    def matrix(self, value_TS: Tensor) -> Tensor:
        """Values per target and candidate as a matrix of readers and sources."""
        value_MM = torch.zeros_like(self.may_MM)
        for target, row_S in zip(self.layout.targets, value_TS.detach().cpu().double(), strict=True):
            sources = list(self.candidates[target])
            value_MM[target, sources] = row_S[: len(sources)]
        return value_MM

    def rows_like(self, value_MM: Tensor, real_TS: Tensor) -> Tensor:
        """The inverse of `matrix`, in the shape, type and place of the real masks."""
        value_TS = torch.zeros_like(real_TS, device="cpu")
        for row_S, target in zip(value_TS, self.layout.targets, strict=True):
            sources = list(self.candidates[target])
            row_S[: len(sources)] = value_MM[target, sources].to(row_S.dtype)
        return value_TS.to(real_TS.device)

    def used(self, share_MM: Tensor) -> Tensor:
        """How much each module is used, between 0 and 1; differentiable."""
        use: list[Tensor] = []
        read_M, unread_M = torch.zeros_like(self.cost_M), torch.ones_like(self.cost_M)
        for j in reversed(range(len(self.cost_M))):
            inner = read_M[j] if self.alone else 1 - unread_M[j]
            use.append(torch.ones_like(inner) if j in self.layout.outputs else inner)
            part_M = share_MM[j] * use[-1]
            read_M, unread_M = read_M + part_M, unread_M * (1 - part_M)
        return torch.stack(use[::-1])

    def cost(self, share_MM: Tensor) -> Tensor:
        """The part of all costs that the used modules have, as expected from shares."""
        return self.used(share_MM) @ self.cost_M

    def worth(self, share_MM: Tensor, grad_MM: Tensor) -> Tensor:
        """The squared gradient of the loss by a part less of each module, with a mean of 1 over those that may go."""
        instead_MM = (share_MM / self.fan_in_M1) @ grad_MM.T  # what reader j would feel of the sources of k, at (k, j)
        slope_M = (share_MM * (grad_MM - instead_MM.T)).sum(dim=0)
        worth_M = slope_M.square() * self.removable_M
        mean = worth_M.sum() / self.removable_M.sum().clamp_min(1)
        return worth_M / mean if mean > 0 else worth_M

    def step(self, share_MM: Tensor, gain_M: Tensor, most: float) -> Tensor:
        """Shares after a step: each use grows by its gain, and all shrink, by their cost, to what the budget allows."""
        use_M = self.used(share_MM)
        return self.moved(share_MM, use_M, self._shrunk(use_M, gain_M, most))

    def sharpened(self, share_MM: Tensor, temperature: float, most: float) -> Tensor:
        """The shares themselves at temperature 1; at 0 the most used modules that the budget allows, as a whole."""
        use_M = self.used(share_MM)
        whole_M, left = (~self.removable_M).double(), most + ROUNDING - float(self.cost_M[~self.removable_M].sum())
        for k in use_M.argsort(descending=True, stable=True).tolist():
            if self.removable_M[k] and self.cost_M[k] <= left:
                whole_M[k], left = 1.0, left - float(self.cost_M[k])
        return self.moved(share_MM, use_M, temperature * use_M + (1 - temperature) * whole_M)

    def moved(self, share_MM: Tensor, use_M: Tensor, now_M: Tensor) -> Tensor:
        """Shares in which modules that may go are used as `now_M` says; a module that is not used at all stays so."""
        for k in self.removable_M.nonzero().flatten().tolist():
            if use_M[k] > ROUNDING:
                share_MM = self.less_of(share_MM, k, 1 - float(now_M[k] / use_M[k]))
        return share_MM

    def less_of(self, share_MM: Tensor, k: int, part: float) -> Tensor:
        """Shares in which module k is used less by this part, and its own sources as much as before."""
        read_M1, instead_1M = share_MM[:, k : k + 1], share_MM[k] / self.fan_in_M1[k]
        changed_MM = share_MM + part * self.may_MM * read_M1 * instead_1M
        changed_MM[:, k] -= part * share_MM[:, k]
        return changed_MM.clamp_(0, 1)

    def _shrunk(self, use_M: Tensor, gain_M: Tensor, most: float) -> Tensor:
        """clip(u + gain - lambda c, 0, 1), with the smallest lambda >= 0 that meets the budget, by bisection."""
        weight_M = self.cost_M / self.cost_M.max()

        def at(pressure: float) -> Tensor:
            return torch.where(self.removable_M, (use_M + gain_M - pressure * weight_M).clamp(0, 1), use_M)

        low, high = 0.0, 1.0
        if at(low) @ self.cost_M <= most:
            return at(low)
        while at(high) @ self.cost_M > most and high < MOST_PRESSURE:
            low, high = high, 2 * high
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) @ self.cost_M > most else (low, middle)
        return at(high)


@lru_cache(maxsize=64)
def budget_of(
    layout: Layout, candidates: Sources, fan_in: tuple[int, ...], costs: tuple[float, ...], keep: float
) -> Budget:
    """The budget of a stack, made once."""
    return Budget(layout, candidates, fan_in, costs, keep)


def parameters_of(modules: Sequence[nn.Module]) -> tuple[float, ...]:
    """The number of parameters of each module; those that several share are not counted, because they would stay."""
    uses = Counter(p for module in modules for p in set(module.parameters()))
    if any(is_lazy(p) for p in uses):
        raise ConfigError("keep is below 1, but lazy modules have no parameters yet; run a batch before mc.attach.")
    return tuple(float(sum(p.numel() for p in set(m.parameters()) if uses[p] == 1)) for m in modules)


def check_costs(costs: Sequence[float], modules: int) -> None:
    """There is one finite cost of 0 or more per module, and not all are 0."""
    if len(costs) != modules:
        raise ConfigError(f"costs has {len(costs)} numbers; the stack has {modules} modules, and each needs one.")
    if not sum(costs) > 0:
        raise ConfigError("keep is below 1, but no module has parameters of its own; give costs=[...] to mc.Blend.")


def _host(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
