"""The folder of `mc.Recorder`: opened, resumed, and what it says about the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer

from maskconnect.core.lookup import require_stacks
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError, integer, shown
from maskconnect.reading import parse_json, read_bytes, read_json, regular
from maskconnect.report.wires import kinds_of
from maskconnect.training.environment import environment
from maskconnect.training.files import LOCK, is_unfinished, lock, remove_unfinished
from maskconnect.training.folder import ENVIRONMENT, METRICS, SUMMARY, WIRING, RunFolder
from maskconnect.training.options import Options

RECORDING = "recording.json"
"""The file that a folder is known by; `recorded.py` reads it."""


def describe(model: nn.Module) -> dict[str, Any]:
    """The model as the page needs it: the layout, candidates and blocks of every stack, as plain data."""
    stacks = require_stacks(model)
    named = {name or "model": _stack(stack) for name, stack in stacks.items()}
    return {"model": type(model).__name__, "stacks": [{"name": name, **stack} for name, stack in named.items()]}


def _stack(stack: MaskedStack) -> dict[str, Any]:
    layout, masks = stack.layout, stack.masks
    return {
        "sizes": list(layout.sizes),
        "layered": layout.layered,
        "all_out": layout.all_out,
        "candidates": [list(row) for row in masks.candidates],
        "fan_in": masks.fan_in_T.tolist(),
        "learned": masks.learned,
        "kinds": list(kinds_of(stack)),
        "parameters": [sum(p.numel() for p in block.parameters()) for block in stack.flat()],
    }


def learning_rates(optimizer: Optimizer | None, masks: Sequence[ConnectivityMasks]) -> dict[str, float | None]:
    """The learning rates of weights and masks, and the factor by which `decay` makes mask updates smaller."""
    by_parameter = {id(m.real): m for m in masks}
    lr = mask_lr = decay = None
    for group in [] if optimizer is None else reversed(optimizer.param_groups):
        held = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]
        learning = [m for m in held if not m.is_frozen]
        if not held:
            lr = float(group["lr"])
        elif learning and len(held) == len(group["params"]):  # in a group with weights, their rate is another
            mask_lr = float(group["lr"])
            decay = learning[0].how.rate_after(max(0, learning[0].steps_taken - 1))
    return {"lr": lr, "mask_lr": mask_lr, "mask_decay": None if decay == 1 else decay}


class Recording:
    """A folder that one process records in, and the epochs that were in it before.

    Args:
        path: the folder.
        described: what `describe` says about the model.
        resume: as in `mc.Recorder`.
    """

    def __init__(self, path: Path, described: dict[str, Any], resume: bool | int) -> None:
        self.path, self.folder = path, RunFolder(path)
        self._lock = _locked(path)
        try:
            self.epochs, size = self._found(described, resume)
            self._clear()
            self.folder.write_json(RECORDING, described)
            self.folder.open_metrics(size)
        except BaseException:
            self.close()
            raise

    def _found(self, described: dict[str, Any], resume: bool | int) -> tuple[list[dict[str, Any]], int]:
        """The epochs to keep, and the number of bytes of their metrics."""
        if not (self.path / RECORDING).exists():
            if any(child.name != LOCK and not is_unfinished(child) for child in self.path.iterdir()):
                raise ConfigError(f"{self.path} is not empty and holds no recording; choose another folder.")
            return [], 0
        lines, sizes = self._epochs()
        if resume is False:
            raise ConfigError(
                f"{self.path} already holds a recording of {len(lines)} epochs; pass resume=True to continue it, or "
                "choose another folder."
            )
        if read_json(self.path / RECORDING) != described:
            raise ConfigError(
                f"{self.path} holds a recording of another model; build the same model, or choose another folder."
            )
        keep = len(lines) if resume is True else integer("resume", resume)
        if not 0 <= keep <= len(lines):
            raise ConfigError(
                f"resume is {shown(resume)}; it must be from 0 to {len(lines)}, the number of epochs in {self.path}."
            )
        return lines[:keep], sizes[keep]

    def _epochs(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The lines of all complete epochs, and the size of the metrics before the first and after each of them."""
        lines, sizes, end = [], [0], 0
        place = self.path / METRICS
        for text in read_bytes(place).splitlines(keepends=True) if place.exists() else []:
            end += len(text)
            if text.endswith(b"\n"):  # a process that was killed may leave a part of a line
                line = parse_json(text)
                if line["kind"] == "epoch":
                    lines.append(line)
                    sizes.append(end)
        return lines, sizes

    def _clear(self) -> None:
        """Remove what belongs to the end of the run, and to later epochs."""
        for name in (SUMMARY, WIRING):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("masks/epoch-*.safetensors"):
            if int(file.stem.removeprefix("epoch-")) > len(self.epochs):
                file.unlink()
        for part in (self.path, self.path / "masks"):
            remove_unfinished(part)

    def note_start(self, model: nn.Module, step: int) -> None:
        """Add this start to environment.json."""
        device = next((str(p.device) for p in model.parameters()), "cpu")
        start = environment(Options()) | {"device": device, "from_step": step}
        kept = [*self.folder.starts(), {key: value for key, value in start.items() if key != "options"}]
        self.folder.write_json(ENVIRONMENT, json.loads(json.dumps(kept, default=str)))

    def keep_masks(self, model: nn.Module, epoch: int) -> None:
        """Write the real masks of every stack, and which candidates its wiring uses."""
        kept: dict[str, torch.Tensor] = {}
        for number, stack in enumerate(require_stacks(model).values()):
            kept[f"stack{number}.real"] = stack.masks.real.detach().cpu().float()
            used_TS = stack.masks.current_wiring().mask_TS.cpu()
            kept[f"stack{number}.used"] = used_TS > 0
        self.folder.write_tensors(f"masks/epoch-{epoch:04d}.safetensors", kept)

    def close(self) -> None:
        """Release the folder."""
        self.folder.close()
        self._lock.close()


def _locked(path: Path) -> TextIO:
    """Hold the folder until the file that is returned is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / LOCK).exists():
            regular(path / LOCK)
        file = (path / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another folder.") from None
    if not lock(file):
        file.close()
        raise ConfigError(f"another process records in {path}; wait for it, or choose another folder.")
    return file
