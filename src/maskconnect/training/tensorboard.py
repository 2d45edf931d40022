"""Metrics for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

CURVES = ("loss", "accuracy", "images_per_second", "lr", "mask_lr", "mask_entropy", "top_changes")


class Board:
    """Curves in a folder; without TensorBoard it does nothing."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.first: int | None = None  # events from this step on are of a run that was stopped after its checkpoint
        self._writer: Any = None
        self._there = writes and importlib.util.find_spec("tensorboard") is not None

    def add(self, line: dict[str, Any]) -> None:
        """The numbers of a line of metrics; those of steps and of epochs are curves apart."""
        if not self._there:
            return
        step = line["step"]
        if self._writer is None:  # not before it is needed: to import it takes longer than the first steps
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self.first)
        for name in CURVES:
            if name in line:
                self._writer.add_scalar(f"{line['kind']}/{name}", line[name], step)
        for part in ("test", "validation", "drawn", "frozen"):
            for name, value in line.get(part, {}).items():
                self._writer.add_scalar(f"{part}/{name}", value, step)

    def flush(self) -> None:
        """Bring what there is onto the disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
