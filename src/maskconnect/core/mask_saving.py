"""How masks are moved, copied, saved and loaded, with everything that a resumed run needs.

A saved state holds the real and binary masks, the progress, the state of the generator and the options of learning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.blend import Blend
from maskconnect.core.draw import Draw
from maskconnect.core.learning import Learning
from maskconnect.core.operators import handle_for
from maskconnect.core.wiring import Sources
from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.reading import parse_json

HOW_BYTES, COST_BYTES = 512, 32
"""The bytes for `how` in a saved state, and for the cost of a module in it: torch.distributed.checkpoint needs tensors
whose sizes depend on the stack only."""


class SavedMasks(nn.Module):
    """The part of `ConnectivityMasks` that moves, copies, saves and loads it."""

    real: nn.Parameter
    frozen: Tensor
    progress: Tensor
    square: Tensor
    source_TS: Tensor
    fan_in_T: Tensor
    generator: torch.Generator
    how: Learning
    attached: bool
    handle: int
    candidates: Sources
    _fitted: Any

    @property
    def steps_taken(self) -> int:
        """How many optimizer steps masks have learned for."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Reset everything to the initial state of the stack."""
        raise NotImplementedError

    def read_buffers(self) -> None:
        """Read from the buffers whether masks are frozen, and to what."""
        raise NotImplementedError

    def restart_learning(self) -> None:
        """Set the number of learned steps to 0. Not in place: a saved state may share these tensors."""
        self.progress, self.square = torch.zeros_like(self.progress), torch.zeros_like(self.square)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SavedMasks:
        """Follow the network to its device and to float64, but never below float32, which would lose small updates."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            low = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if low else moved

        before = self.real.is_meta
        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        if before and not self.real.is_meta:
            self.reset_parameters()  # `to_empty` leaves memory uninitialized
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        generator = bytes(self.generator.get_state().tolist())  # a generator cannot be pickled
        return {**state, "generator": generator, "_seen": None, "_counted": None}  # a copy counts its own changes

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.set_state(torch.tensor(list(state["generator"]), dtype=torch.uint8, device="cpu"))
        super().__setstate__({**state, "generator": generator})  # type: ignore[no-untyped-call]
        self.handle = handle_for(self)  # type: ignore[arg-type]  # every copy needs its own

    def get_extra_state(self) -> Tensor:
        """Return the state of the generator, so that a restored stack continues the same draws, and `how` as JSON."""
        how = json.dumps(to_plain(self.how)).encode().ljust(HOW_BYTES + COST_BYTES * len(self.candidates))
        return torch.cat([self.generator.get_state(), torch.tensor(list(how), dtype=torch.uint8, device="cpu")])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator, and `how` unless `mc.attach` has set it."""
        size = len(self.generator.get_state())
        try:
            self.generator.set_state(state[:size].cpu())
            text = bytes(state[size:].tolist()).decode()
            how = from_plain(parse_json(text)) if text else self.how  # version 0.1 saved the generator only
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"the saved masks are damaged: {error}. Load another checkpoint.") from None
        self._fitted = None
        if not self.attached:
            self.how = how
        elif how != self.how and not self.frozen and self.steps_taken:
            self.restart_learning()
            warnings.warn(
                f"the saved masks learned by {how}; mc.attach has set {self.how} here, which starts at its first step.",
                stacklevel=2,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        expected = {"source": self.source_TS, "fan_in": self.fan_in_T}
        for name, what in (("source", "other candidate sources"), ("fan_in", "another fan-in")):
            saved = state_dict.get(prefix + name)
            if saved is not None and not torch.equal(saved.cpu(), expected[name]):
                raise CheckpointError(
                    f"the saved masks {prefix.rstrip('.')!r} have {what} than this stack; build the stack with the "
                    "arguments that it was saved with."
                )
        if prefix + "real" in state_dict:  # version 0.1 did not save these
            for name in ("progress", "square"):
                state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.frozen.is_meta:
            self.read_buffers()  # now, because compiled code uses the result


def to_plain(how: Learning) -> dict[str, Any]:
    """Return options of learning as plain data, for JSON."""
    return {"way": type(how).__name__.lower()} | {each.name: getattr(how, each.name) for each in fields(how)}


def from_plain(data: dict[str, Any]) -> Learning:
    """Return the options that `to_plain` described."""
    kinds: dict[str, type[Learning]] = {"draw": Draw, "blend": Blend}
    kind = kinds[data["way"]]
    return kind(**{name: value for name, value in data.items() if name != "way"})
