"""A run folder: all files of a run, in formats that any program can read.

recipe.toml          the resolved recipe
data.json            the classes, and the number and checksum of the images
environment.json     versions, commit, threads and options of every start
metrics.jsonl        one line per interval of steps, per epoch, and for the freeze
masks/               the real masks at the end of every epoch in which they learned
wiring.json          which modules feed which, once it is fixed
wiring.svg           the same as a drawing, if modules have kinds
checkpoints/         to resume from; at least two are kept
final/               the trained network, its preprocessing, and its predictions for the test set
summary.json         the results; it exists once the run has finished
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.reading import read_json, regular
from maskconnect.recipes import Recipe, load, write
from maskconnect.recipes.write import assignments
from maskconnect.training import run_files
from maskconnect.training.checkpoint import Checkpoints
from maskconnect.training.environment import environment
from maskconnect.training.files import (
    LOCK,
    is_unfinished,
    load_tensors,
    lock,
    remove_unfinished,
    save_tensors,
    write_atomically,
)
from maskconnect.training.options import Options

MODEL, INPUT, PREDICTIONS = "final/model.safetensors", "final/input.safetensors", "final/predictions.safetensors"
DATA, CLASSES, ENVIRONMENT = "data.json", "final/classes.json", "environment.json"
SUMMARY, WIRING, METRICS = "summary.json", "wiring.json", "metrics.jsonl"
RUN = ("recipe.toml",)
"""The file that a run folder of `maskconnect train` is known by."""
DEPTH = 4
"""The number of levels of folders that `runs_in` searches."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes  # only one rank writes
        self.checkpoints = Checkpoints(folder=path / "checkpoints")
        self._metrics: TextIO | None = None
        self._lock: TextIO | None = None
        self._made: list[Path] = []  # files and folders to remove if the run never starts

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return (self.path / SUMMARY).exists()

    def claim(self, recipe: Recipe) -> dict[str, Any] | None:
        """Claim the folder for this run; an error if it holds another recipe, or if another process uses it.

        Returns the summary of the run, if it has finished.
        """
        if self.path.is_file():
            raise ConfigError(f"{self.path} is a file; name a folder with --out.")
        new = [self.path / name for name in ("recipe.toml", LOCK)] + [self.path, *self.path.parents]
        new = [place for place in new if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in (LOCK, METRICS):  # opening a pipe would block
                if (self.path / name).exists():
                    regular(self.path / name)
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; choose another folder with --out."
            ) from None
        if not lock(self._lock):
            raise ConfigError(
                f"another process is training in {self.path}; wait for it, or choose another folder with --out."
            )
        self._made = new
        place = self.path / "recipe.toml"
        if not place.exists() and any(child.name != LOCK and not is_unfinished(child) for child in self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and does not hold a run; choose another folder with --out.")
        if (self.path / "metrics.jsonl").exists():
            self.check_recipe(recipe)
        else:  # a new run, or one that never started, for example because its data were missing
            write_atomically(place, write(recipe, self.command()))
        for part in (self.path, self.path / "masks", self.path / "final"):
            remove_unfinished(part)
        return self.summary() if self.finished else None

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise an error that names the first difference, if the folder holds a run of another recipe."""
        theirs, ours = (assignments(write(replace(each, about="", paper=None))) for each in (self.recipe(), recipe))
        key = next((key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key)), None)
        if key is None:
            return
        raise ConfigError(
            f"{self.path} holds a run of another recipe: {key} is {theirs.get(key, 'not set')} there and "
            f"{ours.get(key, 'not set')} here. Choose another folder with --out, or add --fresh for a new one."
        )

    def holds_other(self, recipe: Recipe) -> bool:
        """Return whether a run of another recipe has started here."""
        try:
            if (self.path / "metrics.jsonl").exists():
                self.check_recipe(recipe)
        except ConfigError:
            return True
        return False

    def recipe(self) -> Recipe:
        """Return the recipe of the run."""
        return load(str(self.path / "recipe.toml"))

    def note_start(self, options: Options, resumed: int) -> None:
        """Add this start to the record of all starts."""
        if not self.writes:
            return
        starts = [*self.starts(), environment(options) | {"from_step": resumed}]
        write_atomically(self.path / ENVIRONMENT, json.dumps(starts, indent=1, default=str) + "\n")

    def starts(self) -> list[dict[str, Any]]:
        """Return the record of all starts, as far as it can be read."""
        found: Any = []
        with suppress(OSError, ValueError):
            found = read_json(self.path / ENVIRONMENT)
        return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []

    def open_metrics(self, size: int) -> None:
        """Continue the metrics after their first `size` bytes; the steps of later lines will be repeated."""
        if not self.writes:
            return
        place = self.path / "metrics.jsonl"
        self._metrics = place.open("a", encoding="utf-8")
        found = place.stat().st_size
        if found < size:
            raise CheckpointError(
                f"{place} has {found} bytes; the checkpoint expects at least {size}. Restart with --fresh."
            )
        os.truncate(place, size)

    def record(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        if not self.writes:
            return
        assert self._metrics is not None
        self._metrics.write(json.dumps(finite(line)) + "\n")
        self._metrics.flush()

    def metrics_size(self) -> int:
        """Return the number of bytes of metrics, after syncing them to disk."""
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())
        return (self.path / "metrics.jsonl").stat().st_size

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""
        if not self.writes:
            return
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        write_atomically(place, json.dumps(finite(content), indent=1) + "\n")

    def data(self) -> dict[str, Any]:
        """Return the classes, and the numbers and checksums of the images."""
        found: dict[str, Any] = run_files.read_plain(self.path / DATA, run_files.DATA)
        return found

    def wiring(self) -> list[Any]:
        """Return which modules feed which, as plain data."""
        found: list[Any] = run_files.read_plain(self.path / WIRING, run_files.WIRING)
        return found

    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return run_files.read_classes(self.path / CLASSES)

    def mean(self) -> Tensor:
        """Return the mean that is subtracted from every image."""
        return run_files.read_mean(self.path / INPUT)

    def predictions(self, classes: int) -> dict[str, Tensor]:
        """Return the predictions of the final network for the test images."""
        return run_files.read_predictions(self.path / PREDICTIONS, classes)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write tensors atomically."""
        if not self.writes:
            return
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        save_tensors(place, tensors)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return tensors of the run."""
        return load_tensors(self.path / name)

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run; an error if it has not finished."""
        if not self.finished:
            if not self.path.exists():
                raise ConfigError(f"{self.path} does not exist; pass a run folder.")
            if not (self.path / "recipe.toml").exists():
                raise ConfigError(f"{self.path} is not a run folder: it has no recipe.toml. Pass the folder of a run.")
            raise ConfigError(f"the run in {self.path} has not finished; resume it with: {self.command()}")
        found: dict[str, Any] = run_files.read_plain(self.path / SUMMARY, run_files.SUMMARY)
        return found

    def command(self) -> str:
        """Return the command that resumes this run."""
        return shlex.join(["maskconnect", "train", str(self.path / "recipe.toml"), "--out", str(self.path)])

    def close(self) -> None:
        """Release the folder; if the run never started, remove what was created for it."""
        if self._made and not (self.path / "metrics.jsonl").exists():
            for place in self._made:
                with suppress(OSError):  # a folder that is not empty stays
                    place.rmdir() if place.is_dir() else place.unlink()
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()


def finite(value: Any) -> Any:
    """Return plain data with null for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_numbers(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts K=2 before K=10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def runs_in(place: Path, markers: Sequence[str] = RUN) -> list[Path]:
    """Return the run folders inside a folder, at most DEPTH levels below it and not inside hidden folders.

    A run folder holds one of the files `markers`.
    """
    found: list[Path] = []
    for path, inside, files in os.walk(place, followlinks=True):
        level = len(Path(path).relative_to(place).parts)
        is_run = level > 0 and not {*markers}.isdisjoint(files)
        found += [Path(path)] * is_run
        shown = [] if is_run or level == DEPTH else [name for name in inside if not name.startswith(".")]
        inside[:] = sorted(shown, key=_by_numbers)
    return found


def find_runs(places: Sequence[Path], markers: Sequence[str] = RUN) -> list[Path]:
    """Return the run folders in some places; each place is a run folder, or a folder that holds some."""
    found: list[Path] = []
    for place in places:
        if any((place / name).exists() for name in markers):
            found.append(place)
            continue
        if not place.is_dir():
            raise ConfigError(
                f"{place} {'is not a folder' if place.exists() else 'does not exist'}; pass a run folder."
            )
        inside = runs_in(place, markers)
        if not inside:
            raise ConfigError(
                f"{place} holds no run: neither it nor a folder in it has a {' or '.join(markers)}. Pass a run folder."
            )
        found += inside
    return list({path.resolve(): path for path in found}.values())
