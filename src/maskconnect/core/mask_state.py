"""The state of learned connectivity: real masks, binary masks, and the progress of learning (section 3.3).

Shape letters: T targets, S candidate sources. `binary.py` describes the rows and columns of mask matrices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskconnect.core.aggregate import straight_through
from maskconnect.core.binary import BinaryMasks, padded, read_masks, write_mask
from maskconnect.core.draw import Draw
from maskconnect.core.learning import Learning
from maskconnect.core.mask_saving import SavedMasks
from maskconnect.core.operators import handle_for
from maskconnect.core.residual import version_of
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConnectivityError


@dataclass(frozen=True)
class Snapshot:
    """A tensor when its values were read."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        """Note the tensor as it is now."""
        return cls(tensor, version_of(tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this is the same tensor, with the same values as far as torch counts changes."""
        return self.tensor is tensor and self.version == version_of(tensor) and not tensor.is_inference()


class MaskState(SavedMasks):
    """The tensors of `ConnectivityMasks`, and whether they are frozen.

    `real` (m~) is a parameter until the masks are frozen. `how` holds the options of learning and `progress` the number
    of optimizer steps so far; `mc.attach` sets the first and advances the second. All of it is in the `state_dict`.
    """

    binary: Tensor
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
        self.source_TS = padded([candidates[target] for target in layout.targets], -1)
        self.candidate_TS = self.source_TS >= 0
        self._preferred_first_TS = padded(preferred, len(candidates)).argsort(dim=1)
        self.fan_in_T = torch.tensor(fan_in, dtype=torch.int64, device="cpu")
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        self.learned, self._start = fixed is None, fixed
        self.decay = decay  # initial ratio from each candidate to the next nearer one; 1 if all are equal
        self.how: Learning = Draw()
        self.attached = False  # whether `mc.attach` has set `how`; then a loaded state does not change it
        self.every = read_masks(self.candidate_TS, layout, candidates, fan_in)  # all candidates of every target
        self.handle = handle_for(self)  # type: ignore[arg-type]
        self._fixed: BinaryMasks | None = None
        self._seen: tuple[Snapshot, Snapshot] | None = None  # the `frozen` and `binary` that `_fixed` was read from
        self._counted: tuple[Snapshot, int] | None = None  # `progress`, and its value
        self._fitted: tuple[Tensor, BinaryMasks] | None = None  # real masks, and their top-K within a budget

        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.real = nn.Parameter(torch.zeros_like(self.candidate_TS, dtype=dtype), requires_grad=self.learned)
        self.register_buffer("binary", torch.zeros_like(self.candidate_TS))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool, device="cpu"))
        self.register_buffer("progress", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.register_buffer("square", torch.zeros_like(self.real))  # the running mean of squared gradients
        self.register_buffer("source", self.source_TS.clone())  # with fan_in, identifies the stack of a saved state
        self.register_buffer("fan_in", self.fan_in_T.clone())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset everything to the initial state of the stack: nothing learned, nothing drawn."""
        if self.real.is_meta:
            return
        rank_TS = self._preferred_first_TS.argsort(dim=1).double()  # 0 is the nearest
        real_TS = self.candidate_TS * rank_TS.mul(math.log(self.decay)).exp()  # D7: all equal if decay is 1
        if self._start is not None:
            real_TS = write_mask(self._start, self.layout, self.candidates).double()
        self.real.copy_(real_TS / real_TS.sum(dim=1, keepdim=True))
        self.generator.manual_seed(self.seed)
        self.source.copy_(self.source_TS)
        self.fan_in.copy_(self.fan_in_T)
        for buffer in (self.binary, self.frozen, self.progress, self.square):
            buffer.zero_()
        if self._start is not None:
            self.freeze_to(write_mask(self._start, self.layout, self.candidates))

    @property
    def fixed(self) -> BinaryMasks | None:
        """The frozen masks; None while masks are learned.

        The buffers decide. Code that copies buffers (loading, weight averaging) may change them, except through
        `.data`, whose changes torch does not count.
        """
        if torch.compiler.is_compiling() or self.frozen.is_meta:
            return self._fixed
        if self._seen is not None:
            frozen, binary = self._seen
            if frozen.holds(self.frozen) and (self._fixed is None or binary.holds(self.binary)):
                return self._fixed
        self.read_buffers()
        return self._fixed

    @property
    def is_frozen(self) -> bool:
        """Whether the binary masks are fixed, from the start or since `freeze`."""
        return self.fixed is not None

    @property
    def entries(self) -> int:
        """The number of candidate connections, without the paddings of `real`."""
        return int(self.candidate_TS.sum())

    @property
    def steps_taken(self) -> int:
        """The number of optimizer steps that masks have learned for; 0 on the meta device."""
        if self.progress.is_meta:
            return 0
        if self._counted is None or not self._counted[0].holds(self.progress):
            self._counted = Snapshot.of(self.progress), int(self.progress)  # waits for the device
        return self._counted[1]

    def count_step(self) -> None:
        """Count one more optimizer step."""
        taken = self.steps_taken
        self.progress += 1
        self._counted = Snapshot.of(self.progress), taken + 1

    def learn_by(self, how: Learning) -> None:
        """Learn with these options from now on; start at their first step unless they are the same as before."""
        if self.how != how:
            if self.steps_taken and not (self.attached or self.is_frozen):
                warnings.warn(
                    f"the masks were restored after {self.steps_taken} steps by {self.how}; {how} starts at its first "
                    "step. To continue, attach the same options as before.",
                    stacklevel=3,
                )
            self.how, self._fitted = how, None
            self.restart_learning()
        self.attached = True

    def rows(self, masks: BinaryMasks) -> tuple[Tensor, ...]:
        """Return the binary mask of each target; its gradient goes to the real masks unchanged."""
        sizes = [len(self.candidates[target]) for target in self.layout.targets]
        return straight_through(self.real, masks.mask_TS, sizes)

    @torch.no_grad()
    def clip_(self) -> None:
        """Clip the real masks to [0, 1] (Algorithm 1, step 3)."""
        self.real.clamp_(0, 1)

    def on_host(self, real: Tensor) -> Tensor:
        """Return a checked copy of real masks on the host; on the meta device, equal masks."""
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

    def freeze_to(self, mask_TS: Tensor) -> None:
        """Freeze the binary masks to this matrix."""
        self.binary.copy_(mask_TS)
        self.frozen.fill_(True)
        self.real.grad = None
        self.read_buffers()

    def read_buffers(self) -> None:
        """Read from the buffers whether masks are frozen, and to what."""
        fixed = self.masks_from(self._checked(self.binary.cpu())) if self.frozen else None
        if fixed is None and self._fixed is not None:
            self.real.requires_grad_()
        self._fixed, self._seen = fixed, (Snapshot.of(self.frozen), Snapshot.of(self.binary))

    def masks_from(self, mask_TS: Tensor) -> BinaryMasks:
        """Return the wiring that a matrix of binary masks stands for."""
        return read_masks(mask_TS, self.layout, self.candidates)

    def _checked(self, mask_TS: Tensor) -> Tensor:
        if (mask_TS & ~self.candidate_TS).any() or not torch.equal(mask_TS.sum(dim=1), self.fan_in_T):
            raise ConnectivityError(
                "a frozen binary mask does not have as many sources as its fan-in: the saved state is damaged, or "
                "buffers were averaged. With AveragedModel, set use_buffers=False."
            )
        return mask_TS

    def extra_repr(self) -> str:
        """Return what `print(model)` shows about the masks."""
        state = "frozen" if self.is_frozen else "learning"
        return f"{len(self.fan_in_T)} targets, {self.entries} candidate connections, {state}"
