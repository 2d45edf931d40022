"""The state of learned connectivity: real masks, binary masks, and how far learning has come (section 3.3).

Shape letters: T targets, S candidate sources. Row t belongs to the t-th target, its columns to that target's
candidates in ascending order; rows are padded to the longest, and a padding is always zero.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.aggregate import straight_through
from maskconnect.core.budget import ROUNDING, Budget
from maskconnect.core.fit import fit, smallest_cost
from maskconnect.core.learning import Draw, Learning, from_plain, largest, normalize_, to_plain
from maskconnect.core.operators import handle_for
from maskconnect.core.residual import version_of
from maskconnect.core.wiring import Layout, Sources, cover, random_wiring, reaching_output
from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError
from maskconnect.reading import parse_json

HOW_BYTES = 512
"""The room for `how` in a saved state: torch.distributed.checkpoint needs the same size for every `how`."""


@dataclass(frozen=True, eq=False)
class BinaryMasks:
    """The binary masks of one forward pass, as a tensor on the host and as the wiring that they mean.

    Blended masks (`mc.Blend`) are shares between 0 and 1: more than K sources are active, each in part.
    """

    mask_TS: Tensor
    sources: Sources  # the active ones of every module
    fan_in: tuple[int, ...]  # K of every module: what its mask adds up to
    alive: tuple[bool, ...]  # which modules can reach the output
    readers: tuple[int, ...]  # how many targets read each module
    top_TS: Tensor | None = None  # of blended masks: the top-K that they go over to


class ConnectivityMasks(nn.Module):
    """The masks of one stack: `real` (m~) is a parameter until `freeze` fixes `binary` (m) to its top-K.

    `how` says how they learn, and `progress` for how many optimizer steps they have; `mc.attach` sets the first and
    advances the second. Draws are made on the host from a generator of the masks' own, so that neither the device, nor
    dropout, nor another stack changes them. All of this is in the `state_dict`.
    """

    binary: Tensor
    frozen: Tensor
    progress: Tensor
    square: Tensor
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
        self.candidate_TS = self._source_TS >= 0
        self._preferred_first_TS = padded(preferred, len(candidates)).argsort(dim=1)
        self.fan_in_T = torch.tensor(fan_in, dtype=torch.int64, device="cpu")
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        self.learned, self._start = fixed is None, fixed
        self.decay = decay  # from each candidate to the next nearer one, at the start; 1 where all are equal
        self.how: Learning = Draw()
        self.attached = False  # whether `mc.attach` has chosen `how`; then a loaded state does not
        self.every = read_masks(self.candidate_TS, layout, candidates, fan_in)  # all candidates of every target
        self.handle = handle_for(self)
        self._fixed: BinaryMasks | None = None
        self._seen: tuple[int, int] | None = None
        self._counted: tuple[Tensor | None, int, int] = None, 0, 0  # `progress`, its version, and what it was
        self._fitted: tuple[Tensor, BinaryMasks] | None = None  # the top-K within a budget, and of which real masks

        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.real = nn.Parameter(torch.zeros_like(self.candidate_TS, dtype=dtype), requires_grad=self.learned)
        self.register_buffer("binary", torch.zeros_like(self.candidate_TS))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool, device="cpu"))
        self.register_buffer("progress", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.register_buffer("square", torch.zeros_like(self.real))  # the running mean of squared gradients
        self.register_buffer("source", self._source_TS.clone())  # this and fan_in say what a saved state is of
        self.register_buffer("fan_in", self.fan_in_T.clone())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start again: as the stack was built, with nothing learned and nothing drawn."""
        if self.real.is_meta:
            return
        rank_TS = self._preferred_first_TS.argsort(dim=1).double()  # 0 is the nearest
        real_TS = self.candidate_TS * rank_TS.mul(math.log(self.decay)).exp()  # D7: all equal where decay is 1
        if self._start is not None:
            real_TS = write_mask(self._start, self.layout, self.candidates).double()
        self.real.copy_(real_TS / real_TS.sum(dim=1, keepdim=True))
        self.generator.manual_seed(self.seed)
        self.source.copy_(self._source_TS)
        self.fan_in.copy_(self.fan_in_T)
        for buffer in (self.binary, self.frozen, self.progress, self.square):
            buffer.zero_()
        if self._start is not None:
            self._fix(write_mask(self._start, self.layout, self.candidates))

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
        return int(self.candidate_TS.sum())

    @property
    def is_frozen(self) -> bool:
        """Whether the binary masks are fixed: from the start, or since `freeze`."""
        return self.fixed is not None

    @property
    def steps_taken(self) -> int:
        """How many optimizer steps masks have learned for; 0 on the meta device."""
        if self.progress.is_meta:
            return 0
        counted, version, taken = self._counted
        if counted is not self.progress or version != version_of(self.progress) or self.progress.is_inference():
            taken = int(self.progress)  # waits for the device
            self._counted = self.progress, version_of(self.progress), taken
        return taken

    def count_step(self) -> None:
        """Masks have learned for one more optimizer step."""
        taken = self.steps_taken
        self.progress += 1
        self._counted = self.progress, version_of(self.progress), taken + 1

    def check_budget(self, how: Learning) -> None:
        """A budget must be possible in this stack."""
        budget = how.budget(self)
        if budget is None:
            return
        if self.use_all:
            raise ConfigError(f"keep is {budget.keep}, but use_all=True has every module read; choose one of the two.")
        least = smallest_cost(budget, self._preferred_first_TS)
        if least > budget.keep + ROUNDING:
            raise ConfigError(
                f"keep is {budget.keep}; the smallest possible here is {math.ceil(least * 1000) / 1000:g}, because the "
                "first and the last modules stay, and every module that stays needs its fan-in of sources."
            )

    def learn_by(self, how: Learning) -> None:
        """Learn in this way from now on: from its beginning, unless masks learn in just this way already."""
        if self.how != how:
            if self.steps_taken and not (self.attached or self.is_frozen):
                warnings.warn(
                    f"the masks were restored after {self.steps_taken} steps by {self.how}; {how} starts at its first "
                    "step. To go on as before, attach the same.",
                    stacklevel=3,
                )
            self.how, self._fitted = how, None
            self.progress, self.square = torch.zeros_like(self.progress), torch.zeros_like(self.square)
        self.attached = True

    def draw(self) -> BinaryMasks:
        """Step 1 of Algorithm 1: normalise the real masks, write them back, and choose what the next pass reads."""
        return self.draw_from_(self.real, self.binary)

    @torch.no_grad()
    def draw_from_(self, real: Tensor, binary: Tensor) -> BinaryMasks:
        """The same for given tensors in the place of `real` and `binary`, both of which change."""
        real_TS = self.on_host(real)
        normalize_(real_TS, self.candidate_TS)
        real.copy_(real_TS)
        masks = self.how.read(self, real_TS)
        binary.copy_(masks.mask_TS if masks.top_TS is None else masks.top_TS)
        return masks

    @torch.no_grad()
    def top(self, real_TS: Tensor | None = None, *, within_budget: bool = True) -> BinaryMasks:
        """The top-K of every real mask; of equal entries the preferred one (D13); the best ones within a budget.

        `real_TS` are real masks on the host, in the place of the own ones.
        """
        real_TS = self.on_host(self.real) if real_TS is None else real_TS
        real_TS = real_TS.masked_fill(~self.candidate_TS, -torch.inf)
        budget = self.how.budget(self) if within_budget else None
        score_TS = real_TS if budget is None or not budget.alone else self._sharpest(real_TS, budget)
        found = self.best(score_TS, self.preferred_top(score_TS))
        if budget is None or _cost(found, budget) <= budget.keep + ROUNDING:
            return found
        if self._fitted is None or not torch.equal(self._fitted[0], real_TS):
            self._fitted = real_TS, self._meaning(fit(real_TS, budget, self._preferred_first_TS, budget.keep).mask_TS)
        return self._fitted[1]

    def _sharpest(self, real_TS: Tensor, budget: Budget) -> Tensor:
        """The real masks with the modules that the budget allows as a whole, and no others."""
        real_TS = real_TS.double().masked_fill_(~self.candidate_TS, 0)
        normalize_(real_TS, self.candidate_TS)
        sharp_MM = budget.sharpened(budget.matrix(real_TS), 0.0, budget.keep)
        return budget.rows_like(sharp_MM, real_TS).masked_fill_(~self.candidate_TS, -torch.inf)

    def first(self) -> BinaryMasks:
        """The top-K at the start: of masks that learn, the preferred sources."""
        if self._start is not None:
            return self._meaning(write_mask(self._start, self.layout, self.candidates))
        equal_TS = torch.zeros(self.candidate_TS.shape, device="cpu").masked_fill_(~self.candidate_TS, -torch.inf)
        return self.best(equal_TS, self.preferred_top(equal_TS))

    def preferred_top(self, real_TS: Tensor) -> Tensor:
        """The K largest entries of every row, whether or not every module is read then (`use_all`)."""
        order_TS = self._preferred_first_TS
        chosen_TS = largest(real_TS.gather(1, order_TS), self.fan_in_T)
        return torch.zeros_like(chosen_TS).scatter_(1, order_TS, chosen_TS)

    def best(self, score_TS: Tensor, mask_TS: Tensor) -> BinaryMasks:
        """The masks of the largest scores; with `use_all`, the best that leave no module unread."""
        found = self._meaning(mask_TS)
        if not self.use_all or all(found.readers[: self.layout.layers[-1].start]):
            return found
        first, scores = self.layout.targets.start, score_TS.tolist()
        rows = [dict(zip(self.candidates[first + t], row, strict=False)) for t, row in enumerate(scores)]
        covered = cover(found.sources, self.candidates, self.layout, lambda target, k: rows[target - first][k])
        return self._meaning(write_mask(covered, self.layout, self.candidates))

    def swapped_to(self, top_TS: Tensor, real_TS: Tensor) -> Tensor:
        """The real masks in which sources that `use_all` swaps in have the value of those that they replace."""
        largest_TS = self.preferred_top(real_TS)
        for t in (top_TS != largest_TS).any(dim=1).nonzero().flatten().tolist():
            new, old = (top_TS[t] & ~largest_TS[t]).nonzero(), (largest_TS[t] & ~top_TS[t]).nonzero()
            real_TS[t, new], real_TS[t, old] = real_TS[t, old], real_TS[t, new]
        return real_TS

    def blended(self, share_TS: Tensor, top_TS: Tensor) -> BinaryMasks:
        """Masks of shares between 0 and 1, which go over to `top_TS`."""
        return read_masks(share_TS, self.layout, self.candidates, self.fan_in_T.tolist(), top_TS)

    def settled(self) -> BinaryMasks:
        """The frozen masks, or the top-K while they are learned."""
        return self.fixed or self.top()

    def rows(self, masks: BinaryMasks) -> tuple[Tensor, ...]:
        """The binary mask of each target, whose gradient the real masks receive as their own."""
        sizes = [len(self.candidates[target]) for target in self.layout.targets]
        return straight_through(self.real, masks.mask_TS, sizes)

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
        for target, expected in zip(self.layout.targets, self.fan_in_T.tolist(), strict=True):
            if len(sources[target]) != expected or not set(sources[target]) <= set(self.candidates[target]):
                raise ConnectivityError(
                    f"{self.layout.name(target)} cannot read {list(sources[target])}: its fan-in is {expected}, and it "
                    f"may read {list(self.candidates[target])}."
                )
        self._fix(write_mask(sources, self.layout, self.candidates))

    def fix_at_random(self, seed: int) -> None:
        """Fix the binary masks to the wiring that `connectivity="random"` has for this seed."""
        fan_in = self.fan_in_T.tolist()
        self.fix(random_wiring(self.layout, self.candidates, fan_in, seed, use_all=self.use_all))

    def _fix(self, mask_TS: Tensor) -> None:
        self.binary.copy_(mask_TS)
        self.frozen.fill_(True)
        self.real.grad = None
        self._read_buffers()

    def _read_buffers(self) -> None:
        fixed = self._meaning(self._checked(self.binary.cpu())) if self.frozen else None
        if fixed is None and self._fixed is not None:
            self.real.requires_grad_()
        self._fixed, self._seen = fixed, (version_of(self.frozen), version_of(self.binary))

    def _checked(self, mask_TS: Tensor) -> Tensor:
        if (mask_TS & ~self.candidate_TS).any() or not torch.equal(mask_TS.sum(dim=1), self.fan_in_T):
            raise ConnectivityError(
                "the frozen binary masks do not have as many sources a target as its fan-in: the saved state is "
                "damaged, or buffers were averaged (AveragedModel with use_buffers=True)."
            )
        return mask_TS

    def _meaning(self, mask_TS: Tensor) -> BinaryMasks:
        return read_masks(mask_TS, self.layout, self.candidates)

    def on_host(self, real: Tensor) -> Tensor:
        """A copy of real masks, checked: every entry is finite and in [0, 1]. Of the meta device all are equal."""
        if real.is_meta:
            return self.candidate_TS.to(real.dtype)
        real_TS = real.detach().to("cpu", copy=True)
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

        before = self.real.is_meta
        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        if before and not self.real.is_meta:
            self.reset_parameters()  # `to_empty` leaves whatever was in memory
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "generator": bytes(self.generator.get_state().tolist())}  # a generator cannot be sent itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.tensor(list(state["generator"]), dtype=torch.uint8, device="cpu"))
        super().__setstate__({**state, "generator": generator})  # type: ignore[no-untyped-call]
        self.handle = handle_for(self)  # a copy has its own

    def get_extra_state(self) -> Tensor:
        """The state of the generator, so that a restored stack continues the same draws, and `how` as JSON."""
        how = json.dumps(to_plain(self.how)).encode().ljust(HOW_BYTES)
        return torch.cat([self.generator.get_state(), torch.tensor(list(how), dtype=torch.uint8, device="cpu")])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator, and `how` unless `mc.attach` has chosen it."""
        size = len(self.generator.get_state())
        try:
            self.generator.set_state(state[:size].cpu())
            text = bytes(state[size:].tolist()).decode()
            how = from_plain(parse_json(text)) if text else self.how  # version 0.1 saved the generator only
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"the saved state of the masks is damaged: {error}") from None
        self._fitted = None
        if not self.attached:
            self.how = how
        elif how != self.how and not self.frozen and self.steps_taken:
            # Not in place: these may be the very tensors that were saved.
            self.progress, self.square = torch.zeros_like(self.progress), torch.zeros_like(self.square)
            warnings.warn(
                f"the saved masks learned by {how}; mc.attach has set {self.how} here, which starts at its first step.",
                stacklevel=2,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        expected = {"source": self._source_TS, "fan_in": self.fan_in_T}
        for name, what in (("source", "other candidate sources"), ("fan_in", "another fan-in")):
            saved = state_dict.get(prefix + name)
            if saved is not None and not torch.equal(saved.cpu(), expected[name]):
                raise CheckpointError(f"the saved masks {prefix.rstrip('.')!r} have {what} than this stack.")
        if prefix + "real" in state_dict:  # version 0.1 did not save these
            for name in ("progress", "square"):
                state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.frozen.is_meta:
            self._read_buffers()  # now, because compiled code looks at what was read

    def extra_repr(self) -> str:
        """What `print(model)` says of the masks."""
        state = "frozen" if self.is_frozen else "learning"
        return f"{len(self.fan_in_T)} targets, {self.entries} candidate connections, {state}"


def read_masks(
    mask_TS: Tensor,
    layout: Layout,
    candidates: Sources,
    fan_in: Sequence[int] | None = None,
    top_TS: Tensor | None = None,
) -> BinaryMasks:
    """The wiring that a matrix of masks means; `fan_in` (one number per target) and `top_TS` of blended ones only."""
    active: list[tuple[int, ...]] = [()] * layout.targets.start
    for target, row in zip(layout.targets, mask_TS.tolist(), strict=True):
        active.append(tuple(k for k, on in zip(candidates[target], row, strict=False) if on))
    sources = tuple(active)
    count = Counter(k for row in sources for k in row)
    alive = reaching_output(sources, layout.outputs)
    readers = tuple(count[k] for k in range(len(sources)))
    counts = tuple(map(len, sources)) if fan_in is None else (*[0] * layout.targets.start, *fan_in)
    return BinaryMasks(mask_TS, sources, counts, alive, readers, top_TS)


def _cost(masks: BinaryMasks, budget: Budget) -> float:
    """The part of all costs that the modules have which reach the output."""
    return float(torch.tensor(masks.alive, dtype=torch.float64, device="cpu") @ budget.cost_M)


def write_mask(sources: Sources, layout: Layout, candidates: Sources) -> Tensor:
    """The matrix of binary masks that means `sources`."""
    chosen = [set(row) for row in sources]
    return padded([[k in chosen[j] for k in candidates[j]] for j in layout.targets], 0).bool()


def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Rows of different length as one matrix, on the host whatever the default device is."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device="cpu").reshape(len(rows), width)
