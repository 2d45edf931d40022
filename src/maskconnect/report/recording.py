"""The folder of `mc.Recorder`: opened, resumed, and what it says about the model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor, nn
from torch.optim import Optimizer

from maskconnect.core.lookup import require_stacks
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.reading import parse_json, read_bytes, regular
from maskconnect.report.runs import mask_files, one_error
from maskconnect.report.wires import kinds_of
from maskconnect.training.environment import environment
from maskconnect.training.files import LOCK, is_unfinished, lock, remove_unfinished
from maskconnect.training.folder import ENVIRONMENT, METRICS, SUMMARY, WIRING, RunFolder
from maskconnect.training.options import Options
from maskconnect.training.run_files import COUNT, NOTHING, PERCENT, SECONDS, TEXT, Kind, check, read_plain

RECORDING = "recording.json"
"""The file that a folder is known by; `recorded.py` reads it."""

TOP1 = {"top1?": (PERCENT, NOTHING)}
EPOCH_SHAPE = {"step": COUNT, "seconds": SECONDS, "freeze": (COUNT, NOTHING), "test": TOP1}
"""The fields of the line of an epoch that a resumed recording needs."""


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


def used(model: nn.Module) -> list[Tensor]:
    """Which candidates the wiring of each stack uses."""
    return [stack.masks.current_wiring().mask_TS.cpu() > 0 for stack in require_stacks(model).values()]


def new_connections(before: Sequence[Tensor], after: Sequence[Tensor]) -> int:
    """The number of connections in `after` that are not in `before`."""
    return sum(int((new_TS & ~old_TS).sum()) for old_TS, new_TS in zip(before, after, strict=True))


class Recording:
    """A folder that one process records in, and the epochs that were in it before.

    Args:
        path: the folder.
        described: what `describe` says about the model.
        resume: as in `mc.Recorder`.
    """

    def __init__(self, path: Path, described: dict[str, Any], resume: bool | int) -> None:
        self.path, self.folder = path, RunFolder(path)
        try:
            _check_new(path, resume)
            self._lock = _locked(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another folder.") from None
        try:
            self.epochs, size = self._found(described, resume)
            self.used = self._last_used() if self.epochs else []
            self.folder.write_json(RECORDING, described)
            self.folder.open_metrics(size)
            self._clear()
        except BaseException:
            self.close()
            raise

    def _found(self, described: dict[str, Any], resume: bool | int) -> tuple[list[dict[str, Any]], int]:
        """The epochs to keep, and the number of bytes of their metrics."""
        if not (self.path / RECORDING).exists():
            return [], 0
        lines, sizes = self._epochs()
        if resume is False:
            raise ConfigError(
                f"{self.path} already holds a recording of {len(lines)} epochs; pass resume=True to continue it, or "
                "choose another folder."
            )
        if read_plain(self.path / RECORDING, {"model": TEXT}) != described:
            raise ConfigError(
                f"{self.path} holds a recording of another model; build the same model, or choose another folder."
            )
        keep = len(lines) if resume is True else resume
        if keep > len(lines):
            raise ConfigError(
                f"resume is {resume}; it must be from 0 to {len(lines)}, the number of epochs in {self.path}."
            )
        return lines[:keep], sizes[keep]

    def _epochs(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The lines of all complete epochs, and the size of the metrics before the first and after each of them."""
        lines: list[dict[str, Any]] = []
        sizes, end = [0], 0
        place = self.path / METRICS
        found = read_bytes(place).splitlines(keepends=True) if place.exists() else []
        for number, text in enumerate(found, start=1):
            end += len(text)
            if text.endswith(b"\n"):  # a process that was killed may leave a part of a line
                line = _line(text, len(lines) + 1, f"line {number} of {place}")
                if line["kind"] == "epoch":
                    lines.append(line)
                    sizes.append(end)
        return lines, sizes

    def _last_used(self) -> list[Tensor]:
        """The result of `used` at the last kept epoch in which masks learned."""
        with one_error(self.path):
            names = [name for epoch, name in mask_files(self.path).items() if epoch <= len(self.epochs)]
            if not names:
                raise ValueError("the folder has no masks")
            kept = self.folder.tensors(names[-1])
            return [kept[f"stack{number}.used"] for number in range(len(kept) // 2)]

    def _clear(self) -> None:
        """Remove what belongs to the end of the run, and to later epochs."""
        for name in (SUMMARY, WIRING):
            (self.path / name).unlink(missing_ok=True)
        for epoch, name in mask_files(self.path).items():
            if epoch > len(self.epochs):
                (self.path / name).unlink()
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
        kept: dict[str, Tensor] = {}
        for number, (stack, used_TS) in enumerate(zip(require_stacks(model).values(), used(model), strict=True)):
            kept[f"stack{number}.real"] = stack.masks.real.detach().cpu().float()
            kept[f"stack{number}.used"] = used_TS
        self.folder.write_tensors(f"masks/epoch-{epoch:04d}.safetensors", kept)

    def close(self) -> None:
        """Release the folder."""
        self.folder.close()
        self._lock.close()


def _line(text: bytes, epoch: int, where: str) -> dict[str, Any]:
    """A line of metrics; if it is the line of an epoch, then of this one."""
    try:
        line: dict[str, Any] = parse_json(text)
        check(line, {"kind": TEXT}, "it")
        if line["kind"] == "epoch":
            number = Kind(f"{epoch}, the next epoch", lambda found: type(found) is int and found == epoch)
            check(line, EPOCH_SHAPE | {"epoch": number}, "it")
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged: {error}. Remove this line and all after it, or choose another folder."
        ) from None
    return line


def _check_new(path: Path, resume: bool | int) -> None:
    """Refuse a folder that holds no recording, unless one can start there; nothing has been created in it."""
    if (path / RECORDING).exists():
        return
    if resume is not True and resume > 0:
        raise ConfigError(
            f"resume is {resume}, but {path} holds no recording; pass the folder of one, or resume=True to start there."
        )
    if path.is_dir() and any(child.name != LOCK and not is_unfinished(child) for child in path.iterdir()):
        raise ConfigError(f"{path} is not empty and holds no recording; choose another folder.")


def _locked(path: Path) -> TextIO:
    """Hold the folder until the file that is returned is closed; the file says which process holds it."""
    path.mkdir(parents=True, exist_ok=True)
    if (path / LOCK).exists():
        regular(path / LOCK)
    file, ours = (path / LOCK).open("a+", errors="replace"), str(os.getpid())
    if not lock(file):
        with file:
            file.seek(0)
            raise _held(path, by_us=file.read(len(ours) + 1) == ours)
    file.truncate(0)
    file.write(ours)
    file.flush()
    return file


def _held(path: Path, *, by_us: bool) -> ConfigError:
    if by_us:  # as after a cell of a notebook was interrupted
        return ConfigError(
            f"an open recorder of this process records in {path}; call its close(), or restart the process, and retry."
        )
    return ConfigError(f"another process records in {path}; wait for it, or choose another folder.")
