"""Results that outlive their run folders: one small JSON file per run, which can be committed and compared."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.experiments.grid import folder_name
from maskconnect.reading import read_json
from maskconnect.recipes import Recipe, load, write
from maskconnect.recipes.fields import read
from maskconnect.recipes.write import assignments
from maskconnect.ship.description import NAME as SAVED
from maskconnect.training.files import write_atomically
from maskconnect.training.folder import RunFolder, find_runs
from maskconnect.training.run_files import SUMMARY, TEXT, WIRING, check

FORMAT = 2
FILE = {"recipe": {}, "summary": SUMMARY, "images": TEXT, "wiring": WIRING, "starts": [{}]}
STARTS = ("time", "commit", "device", "precision", "cpu", "cuda", "threads", "torch")
"""The fields of environment.json that are kept."""


@dataclass(frozen=True)
class Result:
    """The result of a run, read from its folder or from a kept file."""

    place: Path
    recipe: Recipe
    summary: dict[str, Any]
    images: str  # a checksum of the test images
    wiring: Any
    starts: tuple[dict[str, Any], ...]

    def accuracy(self, on: str = "test") -> float:
        """Return the top-1 accuracy of the last epoch, in %."""
        found = self.summary.get(on)
        if found is None:
            raise ConfigError(f"{self.place} has no {on} images; use runs whose recipe sets data.validation.")
        return float(found["top1"])

    @property
    def left(self) -> int:
        """The number of parameters after pruning."""
        return int(self.summary["parameters"]["pruned"])


def of_run(folder: RunFolder) -> Result:
    """Return the result of a finished run."""
    images = folder.data()["test"]["sha256"]
    starts = tuple({key: start[key] for key in STARTS if key in start} for start in folder.starts())
    return Result(folder.path, folder.recipe(), folder.summary(), images, folder.wiring(), starts)


def of_file(path: Path) -> Result:
    """Read a kept result."""
    remedy = "name a run folder or a result file that `sweep --keep` wrote."
    if path.name == SAVED:
        raise ConfigError(f"{path.parent} is a saved network; {remedy}")
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {remedy}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        old = isinstance(found, dict) and found.get("format") == 1
        hint = "; tools/new_format.py of the repository converts it" if old else ""
        raise ConfigError(f"{path} is not a result file of this version of maskconnect{hint}.")
    try:
        check(found, FILE, "it")
        recipe = read(Recipe, found["recipe"])
        return Result(path, recipe, found["summary"], found["images"], found["wiring"], tuple(found["starts"]))
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Use another copy, or run it again.") from None


def find_results(places: Sequence[Path]) -> list[Result]:
    """Find results in places: kept files, run folders, or folders of either.

    Unfinished runs are left out, unless they were named themselves.
    """
    found: list[Result] = []
    for place in places:
        files = [place] if place.is_file() else sorted(place.glob("*.json")) if _is_kept(place) else None
        if files is not None:
            found += map(of_file, files)
            continue
        runs = (RunFolder(path) for path in find_runs([place]))
        found += (of_run(run) for run in runs if run.finished or run.path == place)
    return list({result.place.resolve(): result for result in found}.values())


def _is_kept(place: Path) -> bool:
    """Return whether a folder holds kept files."""
    return (
        place.is_dir()
        and any(place.glob("*.json"))
        and not (place / "recipe.toml").exists()
        and not any(place.glob("*/recipe.toml"))
    )


class Kept:
    """A folder of kept results, found by recipe and seed."""

    def __init__(self, place: Path) -> None:
        if place.exists() and not place.is_dir():
            raise ConfigError(f"--keep {place} is not a folder; name a folder for result files.")
        self.place = place
        self.found = {key_of(result.recipe): result for result in map(of_file, sorted(place.glob("*.json")))}

    def get(self, recipe: Recipe) -> Result | None:
        """Return the result of exactly this recipe, whatever its name."""
        return self.found.get(key_of(recipe))

    def keep(self, folder: RunFolder) -> Path:
        """Keep the result of a run; fail if it is damaged."""
        result = of_run(folder)
        result.accuracy()
        recipe = replace(result.recipe, about="", paper=None)
        content = {
            "format": FORMAT,
            "recipe": tomllib.loads(write(recipe)),
            "summary": result.summary,
            "images": result.images,
            "wiring": result.wiring,
            "starts": list(result.starts),
        }
        place = self._place(result)
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            write_atomically(place, json.dumps(content) + "\n")
        except OSError as error:
            raise ConfigError(f"--keep {place} cannot be written: {error.strerror}; name another folder.") from None
        self.found[key_of(recipe)] = replace(result, place=place)
        return place

    def _place(self, result: Result) -> Path:
        """Return the file for a run, with a longer name if another run has the usual one."""
        name, key = name_of(result), key_of(result.recipe)
        place = self.place / f"{name}.json"
        if place.exists() and key_of(of_file(place).recipe) != key:
            place = self.place / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
        return place


def key_of(recipe: Recipe) -> str:
    """Return a text that two recipes share only if they describe the same run."""
    return write(replace(recipe, name="", about="", paper=None))


def name_of(result: Result) -> str:
    """Return the name of a run's file: its recipe, the fields that were changed, and the seed.

    With an explicit wiring, it is the name of the run folder, which says where the wiring comes from.
    """
    recipe, changed = result.recipe, list[str]()
    if not isinstance(recipe.model.connectivity, str):
        return folder_name(f"{recipe.name.replace('/', '-')}_{result.place.name}")
    with suppress(ConfigError):  # a recipe from a file that does not exist here
        own, usual = (assignments(write(r)) for r in (recipe, load(recipe.name)))
        differing = [key for key in own if key not in ("about", "seed") and own[key] != usual.get(key)]
        changed = [f"{key.rpartition('.')[2]}={own[key].strip(chr(34))}" for key in differing]
    return folder_name("_".join([recipe.name.replace("/", "-"), *changed, f"seed={recipe.seed}"]))
