"""Results that outlive their run folders: one small JSON file a run, to be committed, compared and counted as done."""

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
from maskconnect.training.files import write_atomically
from maskconnect.training.folder import RunFolder, find_runs
from maskconnect.training.run_files import SUMMARY, TEXT, WIRING, check

FORMAT = 2
FILE = {"recipe": {}, "summary": SUMMARY, "images": TEXT, "wiring": WIRING, "starts": [{}]}
STARTS = ("time", "commit", "device", "precision", "cpu", "cuda", "threads", "torch")
"""What is kept of how a run was started."""


@dataclass(frozen=True)
class Result:
    """What came of a run, as its folder or a kept file tells it."""

    place: Path
    recipe: Recipe
    summary: dict[str, Any]
    images: str  # a checksum of those that it was tested on
    wiring: Any
    starts: tuple[dict[str, Any], ...]

    def accuracy(self, on: str = "test") -> float:
        """Top-1 of the last epoch, in %."""
        found = self.summary.get(on)
        if found is None:
            raise ConfigError(f"{self.place} has no {on} images; its recipe must set data.validation.")
        return float(found["top1"])

    @property
    def left(self) -> int:
        """How many parameters pruning leaves."""
        return int(self.summary["parameters"]["pruned"])


def of_run(folder: RunFolder) -> Result:
    """What came of a run that has ended."""
    images = folder.data()["test"]["sha256"]
    starts = tuple({key: start[key] for key in STARTS if key in start} for start in folder.starts())
    return Result(folder.path, folder.recipe(), folder.summary(), images, folder.wiring(), starts)


def of_file(path: Path) -> Result:
    """What a kept file tells."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name a run folder or a kept result.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        old = isinstance(found, dict) and found.get("format") == 1
        hint = "; tools/new_format.py converts results of format 1" if old else ""
        raise ConfigError(f"{path} is not a kept result of this version of maskconnect{hint}.")
    try:
        check(found, FILE, "it")
        recipe = read(Recipe, found["recipe"])
        return Result(path, recipe, found["summary"], found["images"], found["wiring"], tuple(found["starts"]))
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def find_results(places: Sequence[Path]) -> list[Result]:
    """What is meant by some places: kept files or folders of them, run folders or folders of them.

    Runs that have not ended are left out, unless they were named themselves.
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
    """Whether a folder is one of kept files."""
    return (
        place.is_dir()
        and any(place.glob("*.json"))
        and not (place / "recipe.toml").exists()
        and not any(place.glob("*/recipe.toml"))
    )


class Kept:
    """A folder of kept results, known by what recipe, with what seed, each is of."""

    def __init__(self, place: Path) -> None:
        if place.exists() and not place.is_dir():
            raise ConfigError(f"--keep {place} is no folder; name one for kept results.")
        self.place = place
        self.found = {key_of(result.recipe): result for result in map(of_file, sorted(place.glob("*.json")))}

    def get(self, recipe: Recipe) -> Result | None:
        """The result of just this recipe, whatever it is called."""
        return self.found.get(key_of(recipe))

    def keep(self, folder: RunFolder) -> Path:
        """Keep what came of a run; an error if that is damaged."""
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
        """A file for a run; another where the name is taken by another run, as of a recipe that is not ours."""
        name, key = name_of(result), key_of(result.recipe)
        place = self.place / f"{name}.json"
        if place.exists() and key_of(of_file(place).recipe) != key:
            place = self.place / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
        return place


def key_of(recipe: Recipe) -> str:
    """What two recipes have in common only if they are the same run."""
    return write(replace(recipe, name="", about="", paper=None))


def name_of(result: Result) -> str:
    """What the file of a run is called: its recipe, what was changed in it, and the seed.

    With a wiring that was given it is called as its folder, which says where that comes from.
    """
    recipe, changed = result.recipe, list[str]()
    if not isinstance(recipe.model.connectivity, str):
        return folder_name(f"{recipe.name.replace('/', '-')}_{result.place.name}")
    with suppress(ConfigError):  # a recipe from a file that is not here
        own, usual = (assignments(write(r)) for r in (recipe, load(recipe.name)))
        differing = [key for key in own if key not in ("about", "seed") and own[key] != usual.get(key)]
        changed = [f"{key.rpartition('.')[2]}={own[key].strip(chr(34))}" for key in differing]
    return folder_name("_".join([recipe.name.replace("/", "-"), *changed, f"seed={recipe.seed}"]))
