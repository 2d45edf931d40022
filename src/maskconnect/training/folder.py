"""A run folder: everything that a run leaves behind, as files that anybody can read.

recipe.toml          the resolved recipe
environment.json     versions, commit, threads, options of every start
metrics.jsonl        a line some steps, an epoch, the freeze
masks/               the real masks at the end of every epoch in which they were learned
wiring.json          which modules feed which, once that is fixed
checkpoints/         to go on from; at least two are kept
final/               the trained network, what it needs to read images, and its predictions of the test set
summary.json         what came of it; there is one when the run has ended
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.recipes import Recipe, load, write
from maskconnect.training.checkpoint import Checkpoints
from maskconnect.training.environment import differences, environment
from maskconnect.training.files import TEMPORARY, load_tensors, save_tensors, write_atomically
from maskconnect.training.options import Options

MODEL, INPUT, PREDICTIONS = "final/model.safetensors", "final/input.safetensors", "final/predictions.safetensors"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(folder=path / "checkpoints")
        self._metrics: TextIO | None = None
        self._lock: TextIO | None = None

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return (self.path / "summary.json").exists()

    def claim(self, recipe: Recipe) -> None:
        """Make the folder this run's own; an error if it holds another recipe, or if another process works in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; choose another place by --out."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process trains in {self.path}; wait for it, or choose another --out.") from None
        for left in self.path.glob(f"**/{TEMPORARY}*"):  # by a process that was killed while it wrote a file
            if left.is_file():
                left.unlink()
        place = self.path / "recipe.toml"
        if place.exists() and (self.path / "metrics.jsonl").exists():
            self._compare(recipe)
        elif place.exists():  # that run never began: its data were not there, perhaps
            write_atomically(place, write(recipe))
        elif any(child.name != ".lock" for child in self.path.iterdir()):
            (self.path / ".lock").unlink()
            raise ConfigError(f"{self.path} is not empty and holds no run; choose another place by --out.")
        else:
            write_atomically(place, write(recipe))

    def _compare(self, recipe: Recipe) -> None:
        there, here = write(self.recipe()).splitlines(), write(recipe).splitlines()
        if there == here:
            return
        theirs, ours = (_assignments(lines) for lines in (there, here))
        key = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
        raise ConfigError(
            f"{self.path} holds a run of another recipe: {key} is {theirs.get(key, 'not set')} there and "
            f"{ours.get(key, 'not set')} here. Choose another place by --out, or add --fresh for a new folder."
        )

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return load(str(self.path / "recipe.toml"))

    def note_start(self, options: Options, resumed: int) -> list[str]:
        """Add this start to the record of all; returns in what that matters it differs from the one before."""
        place = self.path / "environment.json"
        starts: list[Any] = []
        with suppress(OSError, ValueError):
            starts = json.loads(place.read_text())
        starts.append(json.loads(json.dumps(environment(options) | {"from_step": resumed}, default=str)))
        write_atomically(place, json.dumps(starts, indent=1) + "\n")
        return differences(starts[-2], starts[-1]) if resumed and len(starts) > 1 else []

    def open_metrics(self, size: int) -> None:
        """Go on with the metrics after their first `size` bytes: later lines are of steps that will be taken again."""
        place = self.path / "metrics.jsonl"
        self._metrics = place.open("a", encoding="utf-8")
        found = place.stat().st_size
        if found < size:
            raise CheckpointError(
                f"{place} has {found} bytes; the checkpoint knows of {size}. Begin anew with --fresh."
            )
        os.truncate(place, size)

    def record(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        assert self._metrics is not None
        self._metrics.write(json.dumps(finite(line)) + "\n")
        self._metrics.flush()

    def metrics_size(self) -> int:
        """How many bytes of metrics there are, all of them on the disk."""
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())
        return (self.path / "metrics.jsonl").stat().st_size

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def write_json(self, name: str, content: Any) -> None:
        """A file that is whole or not there."""
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        write_atomically(place, json.dumps(finite(content), indent=1) + "\n")

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Tensors, likewise."""
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        save_tensors(place, tensors)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of the run."""
        return load_tensors(self.path / name)

    def summary(self) -> dict[str, Any]:
        """What came of the run."""
        try:
            found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            if not (self.path / "recipe.toml").exists():
                raise ConfigError(f"{self.path} is no run folder: it has no recipe.toml.") from None
            raise ConfigError(f"the run in {self.path} has not ended; go on with it: {self.command()}") from None
        except ValueError:
            raise CheckpointError(f"{self.path / 'summary.json'} is damaged.") from None
        return found

    def command(self) -> str:
        """What goes on with this run."""
        return f"maskconnect train {self.path / 'recipe.toml'} --out {self.path}"

    def close(self) -> None:
        """Let go of the folder."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()


def finite(value: Any) -> Any:
    """Plain data whose numbers JSON can hold: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _assignments(lines: list[str]) -> dict[str, str]:
    """The fields of a written recipe, by their full names."""
    found: dict[str, str] = {}
    table, phases = "", 0
    for line in lines:
        if line.startswith("[["):
            table, phases = f"{line.strip('[]')}.{phases}.", phases + 1
        elif line.startswith("["):
            table = line.strip("[]") + "."
        elif " = " in line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            found[table + key] = value
    return found
