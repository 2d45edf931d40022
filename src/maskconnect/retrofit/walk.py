"""The state of a forward pass through blocks that a model calls one by one.

The model may compute anything between its blocks. What it passes to block j counts as the output of block j-1. The
block then reads the aggregate of the sources that its mask makes active.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskconnect.core.inputs import Inputs
from maskconnect.core.outputs import Outputs
from maskconnect.core.residual import version_of
from maskconnect.errors import ConnectivityError
from maskconnect.retrofit.stand_in import Form, Forms
from maskconnect.retrofit.unread import Watch


@dataclass
class WholeOutputs(Outputs):
    """Outputs of blocks that return the sum of their input and their residual, y_k = x_k + F_k.

    A reader with fan-in K gets y_k(K) = F_k + x_k / K = y_k - (1 - 1/K) x_k, so the sum over its K sources adds
    residuals and averages inputs. A single source is not changed. A block that changes the shape has no x_k to add to:
    its whole output is averaged.
    """

    by_fan_in = True
    read: list[Any] = field(default_factory=list)  # x_k
    versions: list[int] = field(default_factory=list)  # of x_k, before the block ran

    def part(self, k: int, fan_in: int) -> Any:
        """Return the output of block k for a reader with this fan-in."""
        y = self.found[k]
        if fan_in == 1 or not isinstance(y, Tensor):
            return y
        x = self.read[k]
        if x.shape != y.shape:
            return y / fan_in
        if version_of(x) != self.versions[k]:
            raise ConnectivityError(
                f"the input of block {k} was changed in place, which its shortcut reads too; use inplace=False in the "
                "first layer of the block, and x = x + f(x) instead of x += f(x)."
            )
        if y is x and x.is_inference():
            raise ConnectivityError(
                f"block {k} returned its input itself, and torch.inference_mode() hides whether it was changed in "
                "place; use torch.no_grad() instead."
            )
        return torch.sub(y, x, alpha=1 - 1 / fan_in)


@dataclass
class Walk:
    """A forward pass up to the last of `outputs`."""

    inputs: Inputs
    outputs: Outputs
    needed: tuple[bool, ...]  # the blocks that run
    forms: Forms  # what passes like this one have found out so far; other threads may change it
    absent: dict[int, Form]  # the forms of blocks that need not run, as known when the pass began
    weak_outputs: list[ReferenceType[Any] | None] = field(default_factory=list)  # the outputs, after the pass has ended
    last: Any = None  # what the latest block returned
    kept: Any = None  # the tensors among the attributes of a block before it ran

    def handed(self, x: Any, times: int = 1) -> None:
        """Note that the model passed x to the next block; several times if it skipped blocks (LayerDrop)."""
        for _ in range(times):
            self.outputs.append(x)

    def block_read(self, x: Any) -> None:
        """Note that the next block reads x."""
        if isinstance(self.outputs, WholeOutputs):
            self.outputs.read.append(x)
            self.outputs.versions.append(version_of(x))

    def read(self, number: int) -> Any:
        """Return the input of a block."""
        return self.inputs.one(number, self.inputs.sources(number, self.outputs))

    def forget(self, number: int) -> None:
        """Release outputs that no block after `number` reads, except for the latest, whose shape is needed."""
        for k in range(len(self.outputs.found) - 1):
            if not any(k in row for row in self.inputs.masks.sources[number + 1 :]):
                self.outputs.drop(k, None)
                if isinstance(self.outputs, WholeOutputs):
                    self.outputs.read[k] = None

    def release(self) -> None:
        """End the pass: outputs stay in memory only if something else keeps them, such as activation checkpointing."""
        self.weak_outputs = [ref(y) if isinstance(y, Tensor) else None for y in self.outputs.found]
        self.outputs, self.last = replace(self.outputs.restarted([]), first=None), None
        if isinstance(self.outputs, WholeOutputs):
            self.outputs.read, self.outputs.versions = [], []

    def replay_at(self, number: int) -> Walk:
        """Return the pass as it was when block `number` ran, which activation checkpointing now repeats."""
        found = [None if y is None else y() for y in self.weak_outputs[:number]]
        lost = any(found[k] is None for k in self.inputs.needed(number))
        if lost or isinstance(self.outputs, WholeOutputs):
            raise ConnectivityError(
                f"block {number} is run again in the backward pass, but its sources no longer exist. With this "
                "aggregation, checkpoint all blocks together, or the modules inside each block."
            )
        return Walk(self.inputs, self.outputs.restarted(found), self.needed, self.forms, self.absent)


class Passes(threading.local):
    """The running passes of one chain; every thread has its own."""

    def __init__(self) -> None:
        self.now: Walk | None = None
        self.first: Any = None  # the input of a pass that is repeated
        self.watches: dict[int, Watch] = {}
        self.looping = False  # whether a loop over the blocks has begun and has not run any

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()  # a copy of a chain has no running pass


class Past:
    """The passes that a backward pass, perhaps in another thread, may repeat, by the inputs of blocks."""

    def __init__(self) -> None:
        self.walks: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[Past], tuple[()]]:
        return Past, ()
