"""Write metrics for TensorBoard, if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

CURVES = ("loss", "accuracy", "images_per_second", "lr", "mask_lr", "mask_entropy", "top_changes")


class Board:
    """A writer of curves, which does nothing without TensorBoard."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.first: int | None = None  # from this step on, events of an interrupted run are discarded
        self._writer: Any = None
        self._there = writes and importlib.util.find_spec("tensorboard") is not None

    def add(self, line: dict[str, Any]) -> None:
        """Add the numbers of a line of metrics; steps and epochs have separate curves."""
        if not self._there:
            return
        step = line["step"]
        if self._writer is None:  # only when needed: importing it takes longer than the first steps
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self.first)
        for name in CURVES:
            if name in line:
                self._writer.add_scalar(f"{line['kind']}/{name}", line[name], step)
        for part in ("test", "validation", "drawn", "frozen"):
            for name, value in line.get(part, {}).items():
                self._writer.add_scalar(f"{part}/{name}", value, step)

    def flush(self) -> None:
        """Flush events to disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write remaining events, and close the file."""
        if self._writer is not None:
            self._writer.close()
