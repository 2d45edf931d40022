"""Convert recipes and kept results of format 1 (version 0.1) to format 2, which has a table [learning].

    .venv/bin/python tools/new_format.py FILE_OR_FOLDER ...

    format 1                                                 format 2
    training.mask_gradient                                   learning.gradient
    model.mask_credit                                        learning.credit
    phase.temperature 1, phase.cool_to 0                     learning.cool = true
    phase.temperature 0                                      learning.temperature = 0
    phase.blend                                              learning.way = "blend"
    phase.even                                               learning.uniform_floor

Kept results are renamed to match. Files with an option that was removed (such as `root`, `mask_momentum` or another
temperature) are listed and not changed.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maskconnect.core.learning import GRADIENTS
from maskconnect.experiments.kept import FORMAT, of_file
from maskconnect.recipes.fields import MOVED, read
from maskconnect.recipes.schema import Recipe
from maskconnect.recipes.write import write
from maskconnect.training.files import write_atomically

Table = dict[str, Any]
NAMES = {
    "mask_credit=": "credit=",
    "mask_gradient=": "gradient=",
    "cool_to=0.0": "cool=true",
    "even=": "uniform_floor=",
}
"""Old and new parts of the names of kept results."""


class RemovedError(Exception):
    """The file has an option that was removed."""


class ByHandError(Exception):
    """The file has to be changed by hand."""


def converted(recipe: Table) -> Table:
    """Convert a recipe of format 1 to format 2."""
    if "learning" in recipe:
        return recipe
    model, training = dict(recipe["model"]), dict(recipe["training"])
    phases = [dict(phase) for phase in recipe["phase"]]
    ways = [
        {
            "temperature": phase.pop("temperature", 1.0),
            "cool_to": phase.pop("cool_to", None),
            "blend": phase.pop("blend", False),
            "even": phase.pop("even", 0.0),
        }
        for phase in phases
    ]
    usual = {"temperature": 1.0, "cool_to": None, "blend": False, "even": 0.0}
    learning = [way for way, phase in zip(ways, phases, strict=True) if phase.get("mask_lr")]
    if any(way != usual for way, phase in zip(ways, phases, strict=True) if not phase.get("mask_lr")):
        raise RemovedError("a phase without mask_lr but with options for learning masks")
    if any(way != learning[0] for way in learning):
        raise RemovedError("phases that learn masks in different ways")
    way = learning[0] if learning else usual
    gradient, credit = training.pop("mask_gradient", "plain"), model.pop("mask_credit", "whole")
    if training.pop("mask_momentum", 0.0):
        raise RemovedError("training.mask_momentum")
    if gradient not in GRADIENTS:
        raise RemovedError(f"training.mask_gradient={gradient}")
    if model.get("aggregation") == "root":
        raise RemovedError("model.aggregation=root")
    if (way["temperature"], way["cool_to"]) not in ((1.0, None), (0.0, None), (1.0, 0.0)):
        raise RemovedError(f"phase.temperature={way['temperature']}, cool_to={way['cool_to']}")
    found: Table = {"way": "blend" if way["blend"] else "draw", "gradient": gradient, "credit": credit}
    if way["blend"]:
        found["uniform_floor"] = way["even"]
    else:
        found |= {"temperature": way["temperature"], "cool": way["cool_to"] is not None}
    return {**recipe, "model": model, "training": training, "learning": found, "phase": phases}


def convert_result(path: Path) -> Path:
    """Convert a kept result in place, and rename it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != 1 or "recipe" not in content:
        return path
    content = {**content, "format": FORMAT, "recipe": converted(content["recipe"])}
    write_atomically(path, json.dumps(content) + "\n")
    of_file(path)  # fails if this is not a result
    place = path.with_name(renamed(path.name))
    if place != path:
        if place.exists():
            raise SystemExit(f"error: {place} exists; {path} was converted but not renamed.")
        path.rename(place)
    return place


def renamed(name: str) -> str:
    """Return the name of a kept result with the new names of fields."""
    if "_blend=true" in name:
        floor = re.search(r"_even=([0-9.]+)(?=_|\.json)", name)
        name = re.sub(r"_even=[0-9.]+(?=_|\.json)", "", name).replace("_cool_to=0.0", "")
        name = name.replace("_blend=true", f"_way=blend_uniform_floor={floor[1] if floor else '0.0'}")
    for old, new in NAMES.items():
        name = name.replace(f"_{old}", f"_{new}")
    return name


def convert_recipe(path: Path) -> Path:
    """Convert the recipe of a run in place; a recipe with a base or variants must be changed by hand."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if {"model", "training", "phase"} <= table.keys() and not {"base", "variant", "learning"} & table.keys():
        write_atomically(path, write(read(Recipe, converted(table))))
        return path
    old_keys = _keys({name: part for name, part in table.items() if name != "learning"})
    if moved := sorted({new for old, new in MOVED.items() if old.rpartition(".")[2] in old_keys}):
        raise ByHandError(f"it has a base or variants; the new names are {', '.join(moved)}")
    return path


def _keys(table: object) -> set[str]:
    """Return the keys of a table and of all tables in it."""
    if isinstance(table, list):
        return set().union(*map(_keys, table))
    return set(table).union(*map(_keys, table.values())) if isinstance(table, dict) else set()


def main(argv: Sequence[str]) -> int:
    """Convert the named files and folders; return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    places = [Path(name) for name in argv]
    for place in places:
        if not place.exists():
            print(f"error: {place} does not exist; name a file or folder to convert.", file=sys.stderr)
            return 2
    kinds = {".json": convert_result, ".toml": convert_recipe}
    files = [f for p in places for f in ([p] if p.is_file() else sorted(p.rglob("*"))) if f.suffix in kinds]
    code = 0
    for path in files:
        if path.suffix == ".toml" and path.is_relative_to(Path("src")):
            continue
        try:
            place = kinds[path.suffix](path)
        except RemovedError as error:
            print(f"not changed: {path} ({error} was removed)")
            continue
        except ByHandError as error:
            print(f"error: change {path} by hand: {error}.", file=sys.stderr)
            code = 2
            continue
        except (KeyError, TypeError):
            continue  # another kind of file
        if place != path:
            print(f"{path} -> {place.name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
