"""A run as a report shows it, whether `maskconnect train` or `mc.Recorder` wrote it.

`runs.py` and `recorded.py` read the two kinds of folder. Nothing else in the report opens the files of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from maskconnect.report.wires import Wires


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A line of metrics about one epoch. A value that was not measured, or was not finite, is None."""

    epoch: int
    step: int  # the number of optimizer steps so far
    lr: float | None
    mask_lr: float | None
    mask_decay: float | None  # the factor by which `decay` makes mask updates smaller; None where there is none
    loss: float | None
    accuracy: float | None
    test_loss: float | None
    test_top1: float | None
    validation_top1: float | None
    entropy: float | None
    changes: int | None
    scales: tuple[float | None, ...]
    freeze: int | None = None  # the epoch after which the wiring was frozen, in a recording
    more: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)  # other values: train, test


@dataclass(frozen=True)
class Frame:
    """The wiring at the end of an epoch."""

    epoch: int
    wires: Wires


@dataclass(frozen=True, kw_only=True)
class Band:
    """A phase, from one epoch to another."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Plain:
    """The wiring of the plain network, to compare with."""

    name: str  # Fixed-Prev
    words: str  # as in plain ResNet
    wires: Wires


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The wiring of one stack over all of training."""

    frames: tuple[Frame, ...]  # one per epoch in which masks learned; the last is the wiring that is used
    name: str = ""  # of a model with several stacks
    parameters: tuple[int, ...] = ()  # of each block
    plain: Plain | None = None  # where it differs from the wiring

    @property
    def wires(self) -> Wires:
        """The current wiring, or the final one."""
        return self.frames[-1].wires


@dataclass(frozen=True)
class Tested:
    """The predictions of the final network for the test images."""

    label_N: Tensor
    class_N: Tensor  # the most likely one
    probability_N: Tensor
    wrong: tuple[int, ...]  # the most confident mistakes, whose pictures were kept
    pictures_WCHW: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a report shows of one run; the subclasses say what they know of the network and the data."""

    path: Path
    summary: dict[str, Any] | None  # None: the run has not ended
    epochs: tuple[Epoch, ...]
    stacks: tuple[Stack, ...]
    starts: tuple[dict[str, Any], ...]  # the environment of every start
    classes: tuple[str, ...] = ()
    tested: Tested | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the first stack, which is the only one in most networks."""
        return self.stacks[0].frames

    @property
    def wires(self) -> Wires:
        """The wiring of the first stack, now or at the end."""
        return self.stacks[0].wires

    @property
    def done(self) -> int:
        """The number of epochs that are done."""
        return max((e.epoch for e in self.epochs), default=0)

    @property
    def test_accuracy(self) -> float | None:
        """In percent, of the last epoch; None where the run has not ended or was not tested (D12)."""
        return None if self.summary is None else self.summary["test"].get("top1")

    @property
    def planned(self) -> int:
        """The number of epochs that the run has when it ends, as far as that is known."""
        raise NotImplementedError

    @property
    def learns(self) -> bool:
        """Whether connectivity is learned, or fixed from the start."""
        raise NotImplementedError

    @property
    def freeze(self) -> int | None:
        """The epoch after which the wiring was, or will be, frozen; None where it never is."""
        raise NotImplementedError

    @property
    def bands(self) -> tuple[Band, ...]:
        """The phases."""
        raise NotImplementedError

    @property
    def fan_in(self) -> int | None:
        """K; None where blocks differ in it by more than their number of candidates."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The kind of wiring: `Learned`, `Fixed-Prev`."""
        raise NotImplementedError

    @property
    def wiring(self) -> str:
        """Its kind, and K: `Learned, K=3`."""
        raise NotImplementedError

    @property
    def network(self) -> str:
        """The name of the network: `ResNet-38`, `ResNeXt {29,8,8}`."""
        raise NotImplementedError

    @property
    def data(self) -> str:
        """The name of the data, if it is known."""
        raise NotImplementedError

    @property
    def about(self) -> str:
        """One line about the run."""
        raise NotImplementedError

    @property
    def loss(self) -> str:
        """The name of the loss."""
        raise NotImplementedError
