"""The masks of one stack: draw from them, find their top-K, freeze them (Algorithm 1 and section 3.3).

Shape letters: T targets, S candidate sources. `binary.py` describes the rows and columns of mask matrices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maskconnect.core.binary import BinaryMasks, read_masks, write_mask
from maskconnect.core.budget import ROUNDING, Budget
from maskconnect.core.fit import fit, smallest_cost
from maskconnect.core.host import copy_from_host_
from maskconnect.core.learning import Learning
from maskconnect.core.mask_state import MaskState
from maskconnect.core.sampling import largest, normalize_
from maskconnect.core.wiring import Sources, cover, random_wiring
from maskconnect.errors import ConfigError, ConnectivityError


class ConnectivityMasks(MaskState):
    """The masks of one stack: `real` (m~) is a parameter until `freeze` fixes `binary` (m) to its top-K.

    Masks are drawn on the host, from a generator that belongs to these masks alone. So the device, dropout and other
    stacks do not change the draws.
    """

    def draw(self) -> BinaryMasks:
        """Normalize the real masks in place, and choose what the next pass reads (Algorithm 1, step 1)."""
        return self.draw_from_(self.real, self.binary)

    @torch.no_grad()
    def draw_from_(self, real: Tensor, binary: Tensor) -> BinaryMasks:
        """Draw from the given tensors instead of `real` and `binary`; both change in place."""
        real_TS = self.on_host(real)
        normalize_(real_TS, self.candidate_TS)
        copy_from_host_(real, real_TS)
        masks = self.how.read(self, real_TS)
        copy_from_host_(binary, masks.mask_TS if masks.top_TS is None else masks.top_TS)
        return masks

    @torch.no_grad()
    def top(self, real_TS: Tensor | None = None, *, within_budget: bool = True) -> BinaryMasks:
        """Return the top-K of every real mask; among equal entries, the preferred source (D13).

        Args:
            real_TS: real masks on the host; None for the masks of this stack.
            within_budget: whether to return the best masks within the budget, if there is a budget.
        """
        real_TS = self.on_host(self.real) if real_TS is None else real_TS
        real_TS = real_TS.masked_fill(~self.candidate_TS, -torch.inf)
        budget = self.how.budget(self) if within_budget else None
        score_TS = real_TS if budget is None or not budget.single_source else self._sharpest(real_TS, budget)
        found = self.best(score_TS, self.preferred_top(score_TS))
        if budget is None or _cost(found, budget) <= budget.keep + ROUNDING:
            return found
        if self._fitted is None or not torch.equal(self._fitted[0], real_TS):
            mask_TS = fit(real_TS, budget, self._preferred_first_TS, budget.keep).mask_TS
            self._fitted = real_TS, self.masks_from(mask_TS)
        return self._fitted[1]

    def _sharpest(self, real_TS: Tensor, budget: Budget) -> Tensor:
        """Return real masks that use the modules which the budget allows fully, and no others."""
        real_TS = real_TS.double().masked_fill_(~self.candidate_TS, 0)
        normalize_(real_TS, self.candidate_TS)
        sharp_MM = budget.sharpened(budget.matrix(real_TS), 0.0, budget.keep)
        return budget.rows_like(sharp_MM, real_TS).masked_fill_(~self.candidate_TS, -torch.inf)

    def current_wiring(self) -> BinaryMasks:
        """Return the frozen masks, or the top-K while masks are learned."""
        return self.fixed or self.top()

    def first(self) -> BinaryMasks:
        """Return the initial top-K; if masks are learned, these are the preferred sources."""
        if self._start is not None:
            return self.masks_from(write_mask(self._start, self.layout, self.candidates))
        equal_TS = torch.zeros(self.candidate_TS.shape, device="cpu").masked_fill_(~self.candidate_TS, -torch.inf)
        return self.best(equal_TS, self.preferred_top(equal_TS))

    def preferred_top(self, real_TS: Tensor) -> Tensor:
        """Return the K largest entries of every row, without regard to `use_all`."""
        order_TS = self._preferred_first_TS
        chosen_TS = largest(real_TS.gather(1, order_TS), self.fan_in_T)
        return torch.zeros_like(chosen_TS).scatter_(1, order_TS, chosen_TS)

    def best(self, score_TS: Tensor, mask_TS: Tensor) -> BinaryMasks:
        """Return the masks of `mask_TS`, the largest scores; with `use_all`, the best that leave no module unread."""
        found = self.masks_from(mask_TS)
        if not self.use_all or all(found.readers[: self.layout.layers[-1].start]):
            return found
        first, scores = self.layout.targets.start, score_TS.tolist()
        rows = [dict(zip(self.candidates[first + t], row, strict=False)) for t, row in enumerate(scores)]
        covered = cover(found.sources, self.candidates, self.layout, lambda target, k: rows[target - first][k])
        return self.masks_from(write_mask(covered, self.layout, self.candidates))

    def swapped_to(self, top_TS: Tensor, real_TS: Tensor) -> Tensor:
        """Return real masks in which the sources that `use_all` adds trade values with the ones that they replace."""
        largest_TS = self.preferred_top(real_TS)
        for t in (top_TS != largest_TS).any(dim=1).nonzero().flatten().tolist():
            new, old = (top_TS[t] & ~largest_TS[t]).nonzero(), (largest_TS[t] & ~top_TS[t]).nonzero()
            real_TS[t, new], real_TS[t, old] = real_TS[t, old], real_TS[t, new]
        return real_TS

    def blended(self, share_TS: Tensor, top_TS: Tensor) -> BinaryMasks:
        """Return masks with shares between 0 and 1, which approach `top_TS`."""
        return read_masks(share_TS, self.layout, self.candidates, self.fan_in_T.tolist(), top_TS)

    def check_budget(self, how: Learning) -> None:
        """Raise an error if the budget of `how` is impossible in this stack."""
        budget = how.budget(self)
        if budget is None:
            return
        if self.use_all:
            raise ConfigError(
                f"keep is {budget.keep}, but use_all=True makes every module read. Set keep=1 or use_all=False."
            )
        least = smallest_cost(budget, self._preferred_first_TS)
        if least > budget.keep + ROUNDING:
            raise ConfigError(
                f"keep is {budget.keep}; the smallest possible here is {math.ceil(least * 1000) / 1000:g}, because the "
                "first and the last modules stay, and every module that stays needs as many sources as its fan-in."
            )

    def freeze(self) -> None:
        """Fix the binary masks to the top-K; frozen masks do not change."""
        if not self.is_frozen:
            self.freeze_to(self.top().mask_TS)

    def fix(self, sources: Sources) -> None:
        """Fix the binary masks to a given wiring with the same fan-in."""
        for target, expected in zip(self.layout.targets, self.fan_in_T.tolist(), strict=True):
            if len(sources[target]) != expected or not set(sources[target]) <= set(self.candidates[target]):
                raise ConnectivityError(
                    f"{self.layout.name(target)} cannot read {list(sources[target])}: its fan-in is {expected}, and it "
                    f"may read {list(self.candidates[target])}."
                )
        self.freeze_to(write_mask(sources, self.layout, self.candidates))

    def fix_at_random(self, seed: int) -> None:
        """Fix the binary masks to the wiring of `connectivity="random"` for this seed."""
        fan_in = self.fan_in_T.tolist()
        self.fix(random_wiring(self.layout, self.candidates, fan_in, seed, use_all=self.use_all))


def _cost(masks: BinaryMasks, budget: Budget) -> float:
    """Return the fraction of all costs that belongs to modules which reach the output."""
    return float(torch.tensor(masks.alive, dtype=torch.float64, device="cpu") @ budget.cost_M)
