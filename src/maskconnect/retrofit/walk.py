"""A forward pass through blocks that a model runs one by one, as it does with a plain list of them.

The model asks for its blocks and calls them, with whatever it does in between. What it hands to block j counts as the
output of block j-1; the block reads the aggregate of the sources that its mask makes active.
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
from maskconnect.errors import ConnectivityError
from maskconnect.retrofit.unread import Watch


@dataclass
class WholeOutputs(Outputs):
    """Outputs of blocks that return what they read and what they add to it, y_k = x_k + F_k, in one.

    A reader of fan-in K gets y_k(K) = F_k + x_k / K = y_k - (1 - 1/K) x_k, so the sum over its K sources adds up what
    they add and averages what they read. A lone source is passed on as it is. A block that changes the shape has no x_k
    to add to: its whole output is averaged.
    """

    by_fan_in = True
    read: list[Any] = field(default_factory=list)  # x_k

    def part(self, k: int, fan_in: int) -> Any:
        """The output of block k as a reader of this fan-in gets it."""
        y = self.found[k]
        if fan_in == 1 or not isinstance(y, Tensor):
            return y
        x = self.read[k]
        return torch.sub(y, x, alpha=1 - 1 / fan_in) if x.shape == y.shape else y / fan_in


@dataclass
class Walk:
    """A forward pass that has come as far as `outputs` say."""

    inputs: Inputs
    outputs: Outputs
    needed: tuple[bool, ...]  # the blocks that run
    loose: list[ReferenceType[Any] | None] = field(default_factory=list)  # the outputs, once the pass is over
    last: Any = None  # what the last block returned
    kept: Any = None  # the tensors that a block had before it ran

    def handed(self, x: Any, times: int = 1) -> None:
        """The model handed x to the next block; several times where it left out blocks before (LayerDrop)."""
        for _ in range(times):
            self.outputs.append(x)

    def block_read(self, x: Any) -> None:
        """The next block reads x."""
        if isinstance(self.outputs, WholeOutputs):
            self.outputs.read.append(x)

    def read(self, number: int) -> Any:
        """The input of a block."""
        return self.inputs.one(number, self.inputs.sources(number, self.outputs))

    def forget(self, number: int) -> None:
        """Let go of what no block after `number` reads; of the latest output the shape is still needed."""
        for k in range(len(self.outputs.found) - 1):
            if not any(k in row for row in self.inputs.masks.sources[number + 1 :]):
                self.outputs.found[k] = None
                self.outputs.drop_aligned(k)
                if isinstance(self.outputs, WholeOutputs):
                    self.outputs.read[k] = None

    def let_go(self) -> None:
        """The pass is over: outputs live on only if somebody else, such as activation checkpointing, keeps them."""
        self.loose = [ref(y) if isinstance(y, Tensor) else None for y in self.outputs.found]
        self.outputs, self.last = replace(self.outputs.restarted([]), first=None), None
        if isinstance(self.outputs, WholeOutputs):
            self.outputs.read = []

    def again(self, number: int) -> Walk:
        """The pass as it was when block `number` ran, which activation checkpointing runs again."""
        found = [None if y is None else y() for y in self.loose[:number]]
        lost = any(found[k] is None for k in self.inputs.needed(number))
        if lost or isinstance(self.outputs, WholeOutputs):
            raise ConnectivityError(
                f"block {number} is run again in the backward pass, and what it read is gone: with this aggregation, "
                "let activation checkpointing go around all blocks, or inside each of them."
            )
        return Walk(self.inputs, self.outputs.restarted(found), self.needed)


class Passes(threading.local):
    """The passes of one chain that are under way; every thread has its own."""

    def __init__(self) -> None:
        self.now: Walk | None = None
        self.first: Any = None  # of a pass that is run again: its input
        self.watches: dict[int, Watch] = {}
        self.looping = False  # a loop over the blocks has begun and has not run any

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()  # a copy of a chain has no pass under way


class Past:
    """The passes that a backward pass, perhaps in another thread, may come back to, by what blocks were given."""

    def __init__(self) -> None:
        self.walks: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[Past], tuple[()]]:
        return Past, ()
