"""Compare finished runs in pairs of equal seeds."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maskconnect.errors import ConfigError
from maskconnect.experiments.kept import find_results
from maskconnect.recipes import Recipe
from maskconnect.recipes.naming import labels_of, wiring_name, without_seed
from maskconnect.training.statistics import Difference, Statistic, difference_by_seed, statistic


@dataclass(frozen=True)
class Side:
    """The runs of one recipe: the accuracy in % and the number of parameters after pruning, by seed."""

    label: str
    accuracy: dict[int, float]
    left: dict[int, int]

    @property
    def statistic(self) -> Statistic:
        """Mean and deviation over all its seeds."""
        return statistic(list(self.accuracy.values()))

    def against(self, baseline: Side) -> Difference:
        """Return by how much it is better, over the seeds that both have."""
        return difference_by_seed(self.accuracy, baseline.accuracy)


def sides_of(places: Sequence[Path], on: str = "test", seeds: Collection[int] | None = None) -> list[Side]:
    """Group runs by recipe, in the order in which they were named; all must have the same test images.

    `on` is "test", or "validation" for choosing between recipes. With `seeds`, runs of other seeds are left out.

    Unfinished runs are left out, unless they were named themselves.
    """
    found: list[tuple[tuple[Recipe, str], Recipe, dict[int, tuple[float, int]]]] = []
    tested: dict[str, Path] = {}
    for result in find_results(places):
        if seeds is not None and result.recipe.seed not in seeds:
            continue
        path, recipe, numbers = result.place, result.recipe, (result.accuracy(on), result.left)
        if tested and result.images not in tested:
            other = next(iter(tested.values()))
            raise ConfigError(
                f"{other} and {path} were tested on different images and cannot be compared; name runs of one data set."
            )
        tested[result.images] = path
        kind = _kind(recipe, path)
        same = next((members for other, _, members in found if other == kind), None)
        if same is None:
            found.append((kind, without_seed(recipe), {recipe.seed: numbers}))
        elif recipe.seed in same:
            raise ConfigError(f"{path} is a second run of seed {recipe.seed} of the same recipe; name each seed once.")
        else:
            same[recipe.seed] = numbers
    recipes = [recipe for (recipe, _), *_ in found]
    labels = labels_of(recipes, [_name(recipe, origin) for (_, origin), recipe, _ in found])
    if len(found) < 2:
        which = "no run" if seeds is None else "no run of these seeds"
        what = f"all runs are of one recipe ({labels[0]})" if found else f"{which} has finished"
        raise ConfigError(f"{what}; name runs of two recipes or more.")
    return [_side(label, members) for label, (*_, members) in zip(labels, found, strict=True)]


def _side(label: str, numbers: dict[int, tuple[float, int]]) -> Side:
    seeds = sorted(numbers)
    return Side(label, {seed: numbers[seed][0] for seed in seeds}, {seed: numbers[seed][1] for seed in seeds})


def _kind(recipe: Recipe, path: Path) -> tuple[Recipe, str]:
    """Return what all runs of one side have in common.

    Runs with an explicit wiring, such as a learned one that is retrained, are of one kind if the names of their folders
    differ only in the seed.
    """
    plain = without_seed(recipe)
    if isinstance(recipe.model.connectivity, str):
        return plain, ""
    origin = re.sub(r"[-_]?seed=?\d+", "", path.name.removesuffix(".json"))
    return replace(plain, model=replace(plain.model, connectivity="full")), origin or "given"


def _name(recipe: Recipe, origin: str) -> str:
    return wiring_name(recipe.model) if not origin else f"{wiring_name(recipe.model)} ({origin})"
