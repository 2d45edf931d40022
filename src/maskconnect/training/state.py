"""The state of a run: everything that changes, and so everything that a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from maskconnect.core.optim import attach, param_groups
from maskconnect.errors import CheckpointError
from maskconnect.recipes.schema import Recipe
from maskconnect.training.metrics import Tally


@dataclass
class Position:
    """The position of the next step."""

    phase: int = 0
    epoch: int = 0  # in the phase
    batch: int = 0  # in the epoch
    step: int = 0  # in the run


@dataclass(kw_only=True)
class State:
    """A network in training."""

    network: nn.Module
    optimizer: SGD
    scaler: torch.amp.GradScaler | None
    position: Position = field(default_factory=Position)
    interval: Tally = field(default_factory=Tally)  # since the last line of metrics
    epoch: Tally = field(default_factory=Tally)
    phases: list[Tally] = field(default_factory=list)  # one per phase
    top: list[list[list[int]]] = field(default_factory=list)  # the connections at the end of the last epoch
    best: dict[str, Any] = field(default_factory=dict)  # the best epoch so far
    freeze: dict[str, Any] = field(default_factory=dict)  # accuracy before and after the freeze
    skipped: int = 0  # batches skipped because their loss was not finite
    seconds: float = 0.0  # total time, including processes that were stopped

    def note_best(self, line: dict[str, Any]) -> None:
        """Remember the best epoch: by the validation set or, if there is none, by the test set (D12)."""
        chosen_on = "validation" if "validation" in line else "test"
        if line[chosen_on]["top1"] > self.best.get(chosen_on, {"top1": -1.0})["top1"]:
            best = {"chosen_on": chosen_on, "epoch": line["epoch"]}
            self.best = best | {part: line[part] for part in ("validation", "test") if part in line}

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "position": asdict(self.position),
            "interval": asdict(self.interval),
            "epoch": asdict(self.epoch),
            "phases": [asdict(tally) for tally in self.phases],
            **{name: getattr(self, name) for name in ("top", "best", "freeze", "skipped", "seconds")},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        try:
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.scaler is not None and saved["scaler"] is not None:
                self.scaler.load_state_dict(saved["scaler"])
            torch.set_rng_state(saved["random"])
            if saved["random_cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(saved["random_cuda"])
            for name, value in saved["position"].items():  # in place, because the schedule shares it
                setattr(self.position, name, value)
            self.interval, self.epoch = Tally(**saved["interval"]), Tally(**saved["epoch"])
            self.phases = [Tally(**tally) for tally in saved["phases"]]
            for name in ("top", "best", "freeze", "skipped", "seconds"):
                setattr(self, name, saved[name])
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"the checkpoint belongs to another network or version: {reason}. Restart with --fresh."
            ) from None


def new_state(network: nn.Module, recipe: Recipe, batches: int, scaler: torch.amp.GradScaler | None) -> State:
    """Return the state of a new run whose epochs have this number of batches."""
    training, first = recipe.training, recipe.phase[0]
    groups = param_groups(
        network,
        lr=first.lr,
        mask_lr=first.mask_lr,
        weight_decay=training.weight_decay,
    )
    optimizer = SGD(groups, lr=first.lr, momentum=training.momentum, nesterov=training.nesterov)
    attach(optimizer, network, recipe.learning.how(max(1, recipe.steps_of_learning(batches))))
    return State(network=network, optimizer=optimizer, scaler=scaler, phases=[Tally() for _ in recipe.phase])
