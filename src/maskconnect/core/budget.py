"""Learn what to remove: a wiring whose used modules stay within a budget (`mc.Blend(steps=N, keep=0.6)`).

The shares s_jk that target j reads of module k determine, from the outputs backwards, how much each module is used:

    u_k = sum_j s_jk u_j                  exact if each target reads one source; u = 1 for outputs
    u_k = 1 - prod_j (1 - s_jk u_j)       otherwise, as if the readers chose independently

To reduce the use of k by a part r, its readers replace this part by what k itself reads; no other use changes:

    s_j <- s_j + r s_jk (s_k / K_k - e_k)

The mask gradient gives the effect on the loss, dl/dr of module k. Its square is the worth w_k of the module (the Fisher
information of a gate on the module, as in pruning by Taylor expansion). Every step changes all uses to

    u_k <- clip(u_k + lr w_k - lambda c_k, 0, 1)

with the smallest lambda >= 0 for which sum_k c_k u_k is within the budget of that step. A module that is used less has
less worth, so uses approach 0 or 1. If each target of a chain reads one source, a pass reads these uses at temperature
1, and at temperature 0 the most used modules that the budget allows, fully.

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

FINAL_BUDGET_AFTER = 0.7
"""The part of the steps after which the budget is `keep`; before that, it falls linearly from 1."""
MAX_PRESSURE = 1e9
"""The largest lambda; it is reached if modules that must stay cost more than the budget of a step."""
ROUNDING = 1e-9
"""The rounding error by which costs may exceed a budget."""


class Budget:
    """The limit on the cost of the used modules of a stack. `budget_of` shares it between equal stacks.

    Args:
        layout: the layout of the stack.
        candidates: the candidate sources of every module.
        fan_in: K of every target.
        costs: the cost of every module.
        keep: the fraction of all costs that used modules may have in the end.
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
        self.single_source = len(layout.outputs) == 1 and set(fan_in) <= {1}

    def limit_after(self, progress: float) -> float:
        """Return the budget after this part of the steps."""
        return 1 - (1 - self.keep) * min(1.0, progress / FINAL_BUDGET_AFTER)

    def matrix(self, value_TS: Tensor) -> Tensor:
        """Return values per target and candidate as a matrix of readers and sources."""
        value_MM = torch.zeros_like(self.may_MM)
        for target, row_S in zip(self.layout.targets, value_TS.detach().cpu().double(), strict=True):
            sources = list(self.candidates[target])
            value_MM[target, sources] = row_S[: len(sources)]
        return value_MM

    def rows_like(self, value_MM: Tensor, real_TS: Tensor) -> Tensor:
        """Invert `matrix`; the result has the shape, dtype and device of the real masks."""
        value_TS = torch.zeros_like(real_TS, device="cpu")
        for row_S, target in zip(value_TS, self.layout.targets, strict=True):
            sources = list(self.candidates[target])
            row_S[: len(sources)] = value_MM[target, sources].to(row_S.dtype)
        return value_TS.to(real_TS.device)

    def used(self, share_MM: Tensor) -> Tensor:
        """Return how much each module is used, between 0 and 1; differentiable."""
        use: list[Tensor] = []
        read_M, unread_M = torch.zeros_like(self.cost_M), torch.ones_like(self.cost_M)
        for j in reversed(range(len(self.cost_M))):
            inner = read_M[j] if self.single_source else 1 - unread_M[j]
            use.append(torch.ones_like(inner) if j in self.layout.outputs else inner)
            part_M = share_MM[j] * use[-1]
            read_M, unread_M = read_M + part_M, unread_M * (1 - part_M)
        return torch.stack(use[::-1])

    def cost(self, share_MM: Tensor) -> Tensor:
        """Return the expected fraction of all costs that the used modules have."""
        return self.used(share_MM) @ self.cost_M

    def worth(self, share_MM: Tensor, grad_MM: Tensor) -> Tensor:
        """Return the squared gradient of the loss by r of each module, with a mean of 1 over removable modules."""
        instead_MM = (share_MM / self.fan_in_M1) @ grad_MM.T  # at (k, j): the effect on reader j of the sources of k
        slope_M = (share_MM * (grad_MM - instead_MM.T)).sum(dim=0)
        worth_M = slope_M.square() * self.removable_M
        mean = worth_M.sum() / self.removable_M.sum().clamp_min(1)
        return worth_M / mean if mean > 0 else worth_M

    def step(self, share_MM: Tensor, gain_M: Tensor, most: float) -> Tensor:
        """Return the shares after a step: each use grows by its gain, then all shrink by cost to fit the budget."""
        use_M = self.used(share_MM)
        return self.moved(share_MM, use_M, self._shrunk(use_M, gain_M, most))

    def sharpened(self, share_MM: Tensor, temperature: float, most: float) -> Tensor:
        """Return the shares at temperature 1; at 0, shares that fully use the most used modules within the budget."""
        use_M = self.used(share_MM)
        whole_M, left = (~self.removable_M).double(), most + ROUNDING - float(self.cost_M[~self.removable_M].sum())
        for k in use_M.argsort(descending=True, stable=True).tolist():
            if self.removable_M[k] and self.cost_M[k] <= left:
                whole_M[k], left = 1.0, left - float(self.cost_M[k])
        return self.moved(share_MM, use_M, temperature * use_M + (1 - temperature) * whole_M)

    def moved(self, share_MM: Tensor, use_M: Tensor, now_M: Tensor) -> Tensor:
        """Return shares that use removable modules as much as `now_M` says; unused modules stay unused."""
        for k in self.removable_M.nonzero().flatten().tolist():
            if use_M[k] > ROUNDING:
                share_MM = self.less_of(share_MM, k, 1 - float(now_M[k] / use_M[k]))
        return share_MM

    def less_of(self, share_MM: Tensor, k: int, part: float) -> Tensor:
        """Return shares that use module k less by this part, and its sources as much as before."""
        read_M1, instead_1M = share_MM[:, k : k + 1], share_MM[k] / self.fan_in_M1[k]
        changed_MM = share_MM + part * self.may_MM * read_M1 * instead_1M
        changed_MM[:, k] -= part * share_MM[:, k]
        return changed_MM.clamp_(0, 1)

    def _shrunk(self, use_M: Tensor, gain_M: Tensor, most: float) -> Tensor:
        """Return clip(u + gain - lambda c, 0, 1) with the smallest lambda >= 0 within the budget, by bisection."""
        weight_M = self.cost_M / self.cost_M.max()

        def at(pressure: float) -> Tensor:
            return torch.where(self.removable_M, (use_M + gain_M - pressure * weight_M).clamp(0, 1), use_M)

        low, high = 0.0, 1.0
        if at(low) @ self.cost_M <= most:
            return at(low)
        while at(high) @ self.cost_M > most and high < MAX_PRESSURE:
            low, high = high, 2 * high
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) @ self.cost_M > most else (low, middle)
        return at(high)


@lru_cache(maxsize=64)
def budget_of(
    layout: Layout, candidates: Sources, fan_in: tuple[int, ...], costs: tuple[float, ...], keep: float
) -> Budget:
    """Return the budget of a stack; equal stacks share it."""
    return Budget(layout, candidates, fan_in, costs, keep)


def parameters_of(modules: Sequence[nn.Module]) -> tuple[float, ...]:
    """Return the number of parameters per module, without parameters that modules share, because those stay."""
    uses = Counter(p for module in modules for p in set(module.parameters()))
    if any(is_lazy(p) for p in uses):
        raise ConfigError("keep is below 1, but lazy modules have no parameters yet. Run a batch before mc.attach.")
    return tuple(float(sum(p.numel() for p in set(m.parameters()) if uses[p] == 1)) for m in modules)


def check_costs(costs: Sequence[float], modules: int) -> None:
    """Raise an error unless there is one cost per module, and not all are 0."""
    if len(costs) != modules:
        raise ConfigError(f"costs has {len(costs)} numbers; the stack has {modules} modules. Give one cost per module.")
    if not sum(costs) > 0:
        raise ConfigError("keep is below 1, but the cost of every module is 0; pass costs=[...] above 0 to mc.Blend.")


def _host(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
