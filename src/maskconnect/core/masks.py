"""Connectivity masks: real-valued while they are learned, binary in every forward pass (section 3.3).

Shape letters: T targets, S candidate sources, padded as `binary.py` says; a padding is always zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.aggregate import straight_through
from maskconnect.core.binary import BinaryMasks, padded, read_masks, write_mask
from maskconnect.core.cover import cover, random_wiring
from maskconnect.core.residual import version_of
from maskconnect.core.sampling import largest, noisy_scores, normalize_, shares
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import CheckpointError, ConnectivityError


class ConnectivityMasks(nn.Module):
    """The masks of one stack: `real` (m~) is a parameter until `freeze` fixes `binary` (m) to its top-K.

    Draws are made on the host from a generator of the masks' own, so that neither the device, nor dropout,
    nor another stack changes them.
    """

    binary: Tensor
    frozen: Tensor
    source: Tensor
    fan_in: Tensor

    def __init__(
        self,
        layout: Layout,
        candidates: Sources,
        fan_in: Sequence[int],
        *,
        fixed: Sources | None = None,
        decay: float = 1.0,
        use_all: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layout, self.candidates, self.use_all = layout, candidates, use_all
        preferred = [[layout.preferred(target, k) for k in candidates[target]] for target in layout.targets]
        self._source_TS = padded([candidates[target] for target in layout.targets], -1)
        self._candidate_TS = self._source_TS >= 0
        self._preferred_first_TS = padded(preferred, len(candidates)).argsort(dim=1)
        self._fan_in_T = torch.tensor(fan_in, dtype=torch.int64, device="cpu")
        self.generator = torch.Generator().manual_seed(seed)
        self.learned = fixed is None
        self.decay = decay  # from each candidate to the next nearer one, at the start; 1 where all are equal
        self.temperature = 1.0  # of the draws: 1 is the paper's, 0 takes the top-K itself
        self.blend = False  # whether a pass reads all candidates, each in part, where it would draw K of them
        self.scheduled = False  # whether `mc.attach(..., steps=N)` blends and cools them
        self.even = 0.0  # how much of a mask is spread evenly over its candidates where they are blended
        self._fixed: BinaryMasks | None = None
        self._seen: tuple[int, int] | None = None

        rank_TS = self._preferred_first_TS.argsort(dim=1).double()  # 0 is the nearest
        real_TS = self._candidate_TS * rank_TS.mul(math.log(decay)).exp()  # D7: all equal where decay is 1
        real_TS /= real_TS.sum(dim=1, keepdim=True)
        self.real = nn.Parameter(real_TS.to(torch.promote_types(torch.get_default_dtype(), torch.float32)))
        self.register_buffer("binary", torch.zeros_like(self._candidate_TS))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool, device="cpu"))
        self.register_buffer("source", self._source_TS.clone())  # this and fan_in say what a saved state is of
        self.register_buffer("fan_in", self._fan_in_T.clone())
        if fixed is not None:
            mask_TS = write_mask(fixed, layout, candidates)
            self.real.data.copy_(mask_TS / mask_TS.sum(dim=1, keepdim=True))
            self._fix(mask_TS)

    @property
    def fixed(self) -> BinaryMasks | None:
        """What the binary masks mean where they are frozen; None while they are learned.

        The buffers decide, and whoever copies buffers (loading, averaging of weights) may change them.
        """
        if torch.compiler.is_compiling() or self.frozen.is_meta:
            return self._fixed
        seen = version_of(self.frozen), version_of(self.binary)
        if self._seen is None or seen[0] != self._seen[0] or (self._fixed is not None and seen != self._seen):
            self._read_buffers()
        return self._fixed

    @property
    def entries(self) -> int:
        """How many candidate connections there are; `real` also has paddings."""
        return int(self._candidate_TS.sum())

    @property
    def is_frozen(self) -> bool:
        """Whether the binary masks are fixed: from the start, or since `freeze`."""
        return self.fixed is not None

    @torch.no_grad()
    def draw(self) -> BinaryMasks:
        """Normalise the real masks, written back as in Algorithm 1, and draw binary ones from them, or blend them."""
        real_TS = self._on_host()
        normalize_(real_TS, self._candidate_TS)
        self.real.copy_(real_TS)
        if not self.temperature:
            top = self.top()
            self.binary.copy_(top.mask_TS)
            return top
        if self.blend:
            return self._blended(real_TS)
        score_TS = noisy_scores(real_TS, self._candidate_TS, generator=self.generator, temperature=self.temperature)
        drawn = self._best(score_TS, largest(score_TS, self._fan_in_T))
        self.binary.copy_(drawn.mask_TS)
        return drawn

    @torch.no_grad()
    def top(self) -> BinaryMasks:
        """The top-K of every real mask; of equal entries the preferred one (D13)."""
        real_TS = self._on_host().masked_fill_(~self._candidate_TS, -torch.inf)
        return self._best(real_TS, self._preferred(real_TS))

    def _preferred(self, real_TS: Tensor) -> Tensor:
        order_TS = self._preferred_first_TS
        chosen_TS = largest(real_TS.gather(1, order_TS), self._fan_in_T)
        return torch.zeros_like(chosen_TS).scatter_(1, order_TS, chosen_TS)

    def _blended(self, real_TS: Tensor) -> BinaryMasks:
        """The shares of all candidates, which go over to the top-K as the temperature goes to 0."""
        if not 0 <= self.even < 1:
            raise ConnectivityError(f"masks.even is {self.even}; it must be at least 0 and below 1.")
        plain_TS = self._preferred(real_TS)
        top_TS = self._best(real_TS, plain_TS).mask_TS
        self.binary.copy_(top_TS)
        for t in (top_TS != plain_TS).any(dim=1).nonzero().flatten().tolist():  # two that were swapped swap shares too
            new, old = (top_TS[t] & ~plain_TS[t]).nonzero(), (plain_TS[t] & ~top_TS[t]).nonzero()
            real_TS[t, new], real_TS[t, old] = real_TS[t, old], real_TS[t, new]
        share_TS = shares(real_TS, self._candidate_TS, self._fan_in_T, temperature=self.temperature, even=self.even)
        return read_masks(share_TS, self.layout, self.candidates, self._fan_in_T.tolist())

    def _best(self, score_TS: Tensor, mask_TS: Tensor) -> BinaryMasks:
        """What masks of the largest scores mean; where all modules are to be used, the best that use them."""
        found = self._meaning(mask_TS)
        if not self.use_all or all(found.readers[: self.layout.layers[-1].start]):
            return found
        first, scores = self.layout.targets.start, score_TS.tolist()
        rows = [dict(zip(self.candidates[first + t], row, strict=False)) for t, row in enumerate(scores)]
        covered = cover(found.sources, self.candidates, self.layout, lambda target, k: rows[target - first][k])
        return self._meaning(write_mask(covered, self.layout, self.candidates))

    def settled(self) -> BinaryMasks:
        """The frozen masks, or the top-K while they are learned."""
        return self.fixed or self.top()

    def rows(self, masks: BinaryMasks) -> tuple[Tensor, ...]:
        """The binary mask of each target, whose gradient the real masks receive as their own."""
        sizes = [len(self.candidates[target]) for target in self.layout.targets]
        return straight_through(self.real, masks.mask_TS, sizes)

    @torch.no_grad()
    def shape_gradient_(self, kind: str) -> None:
        """Take from the gradient of each mask its mean over candidates; make it 1 long if its direction counts.

        "none" sets it to zero.
        """
        if kind == "plain" or self.real.grad is None:
            return
        if kind == "none":
            self.real.grad.zero_()
            return
        grad_TS, candidate_TS = self.real.grad, self._candidate_TS.to(self.real.device)
        mean_T1 = grad_TS.sum(dim=1, keepdim=True) / candidate_TS.sum(dim=1, keepdim=True)
        grad_TS.sub_(mean_T1 * candidate_TS)
        if kind == "direction":
            length_T1 = grad_TS.norm(dim=1, keepdim=True)
            grad_TS.div_(torch.where(length_T1 > 0, length_T1, 1.0))

    @torch.no_grad()
    def clip_(self) -> None:
        """Bring the real masks back into [0, 1] (Algorithm 1, step 3)."""
        self.real.clamp_(0, 1)

    def freeze(self) -> None:
        """Fix the binary masks to the top-K; nothing changes where they are fixed already."""
        if not self.is_frozen:
            self._fix(self.top().mask_TS)

    def fix(self, sources: Sources) -> None:
        """Fix the binary masks to a given wiring, of the same fan-in."""
        for target, expected in zip(self.layout.targets, self._fan_in_T.tolist(), strict=True):
            if len(sources[target]) != expected or not set(sources[target]) <= set(self.candidates[target]):
                raise ConnectivityError(
                    f"{self.layout.name(target)} cannot read {list(sources[target])}: its fan-in is {expected}, and it "
                    f"may read {list(self.candidates[target])}."
                )
        self._fix(write_mask(sources, self.layout, self.candidates))

    def fix_at_random(self, seed: int) -> None:
        """Fix the binary masks to the wiring that `connectivity="random"` has for this seed."""
        fan_in = self._fan_in_T.tolist()
        self.fix(random_wiring(self.layout, self.candidates, fan_in, seed, use_all=self.use_all))

    def _fix(self, mask_TS: Tensor) -> None:
        self.binary.copy_(mask_TS)
        self.frozen.fill_(True)
        self.real.grad = None
        self._read_buffers()

    def _read_buffers(self) -> None:
        fixed = self._meaning(self._checked(self.binary.cpu())) if self.frozen else None
        if (fixed is None) != (self._fixed is None):
            self.real.requires_grad_(fixed is None)
        self._fixed, self._seen = fixed, (version_of(self.frozen), version_of(self.binary))

    def _checked(self, mask_TS: Tensor) -> Tensor:
        if (mask_TS & ~self._candidate_TS).any() or not torch.equal(mask_TS.sum(dim=1), self._fan_in_T):
            raise ConnectivityError(
                "the frozen binary masks do not have as many sources a target as its fan-in: the saved state is "
                "damaged, or buffers were averaged (AveragedModel with use_buffers=True)."
            )
        return mask_TS

    def _meaning(self, mask_TS: Tensor) -> BinaryMasks:
        return read_masks(mask_TS, self.layout, self.candidates)

    def _on_host(self) -> Tensor:
        """The real masks, checked: every entry is finite and in [0, 1]. On the meta device all candidates are equal."""
        if self.real.is_meta:
            return self._candidate_TS.to(self.real.dtype)
        real_TS = self.real.detach().to("cpu", copy=True)
        wrong_TS = ~((real_TS >= 0) & (real_TS <= 1 + 1e-6))
        if wrong_TS.any():
            t, s = wrong_TS.nonzero()[0].tolist()
            target = self.layout.targets[t]
            entry = f"the real mask of {self.layout.name(target)} at {self.layout.name(self.candidates[target][s])}"
            if real_TS.isfinite().all():
                raise ConnectivityError(
                    f"{entry} is {real_TS[t, s]:.4g}, outside [0, 1]. Call mc.attach(optimizer, model) once, "
                    "so that every step clips the masks."
                )
            raise ConnectivityError(
                f"{entry} is {real_TS[t, s]}: the loss or the output of that source was not finite in an earlier step. "
                "Lower the learning rates or check the data."
            )
        return real_TS

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConnectivityMasks:
        """Follow the network to its device and to float64, but never below float32: small updates would be lost."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            low = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if low else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> Tensor:
        """The state of the generator, so that a restored stack continues the same sequence of draws."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator."""
        try:
            self.generator.set_state(state.cpu())
        except (AttributeError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"the saved state of the mask generator is damaged: {error}") from None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        expected = {"source": self._source_TS, "fan_in": self._fan_in_T}
        for name, what in (("source", "other candidate sources"), ("fan_in", "another fan-in")):
            saved = state_dict.get(prefix + name)
            if saved is not None and not torch.equal(saved.cpu(), expected[name]):
                raise CheckpointError(f"the saved masks {prefix.rstrip('.')!r} have {what} than this stack.")
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._seen = None

    def extra_repr(self) -> str:
        """What `print(model)` says of the masks."""
        state = "frozen" if self.is_frozen else "learning"
        return f"{len(self._fan_in_T)} targets, {self.entries} candidate connections, {state}"
