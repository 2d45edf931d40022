"""Compare finished runs in pairs of equal seeds, and say plainly what that shows."""

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
    """Runs of one recipe: of each seed the accuracy, in %, and how many parameters pruning leaves."""

    label: str
    accuracy: dict[int, float]
    left: dict[int, int]

    @property
    def statistic(self) -> Statistic:
        """Over all its seeds."""
        return statistic(list(self.accuracy.values()))

    def against(self, baseline: Side) -> Difference:
        """By how much it is better, over the seeds that both have."""
        return difference_by_seed(self.accuracy, baseline.accuracy)


def sides_of(places: Sequence[Path], on: str = "test", seeds: Collection[int] | None = None) -> list[Side]:
    """The runs by recipe, in the order in which they were named; all must be of the same test images.

    `on` is "test", or "validation" where a choice is to be made. With `seeds`, runs of other seeds are left out.

    Runs that have not ended are left out, unless they were named themselves.
    """
    found: list[tuple[tuple[Recipe, str], Recipe, dict[int, tuple[float, int]]]] = []
    tested: dict[str, Path] = {}
    for result in find_results(places):
        if seeds is not None and result.recipe.seed not in seeds:
            continue
        path, recipe, numbers = result.place, result.recipe, (result.accuracy(on), result.left)
        if tested and result.images not in tested:
            other = next(iter(tested.values()))
            raise ConfigError(f"{other} and {path} were tested on different images; there is nothing to compare.")
        tested[result.images] = path
        kind = _kind(recipe, path)
        same = next((members for other, _, members in found if other == kind), None)
        if same is None:
            found.append((kind, without_seed(recipe), {recipe.seed: numbers}))
        elif recipe.seed in same:
            raise ConfigError(f"{path} is a run of a seed, {recipe.seed}, that was named before; name each seed once.")
        else:
            same[recipe.seed] = numbers
    recipes = [recipe for (recipe, _), *_ in found]
    labels = labels_of(recipes, [_name(recipe, origin) for (_, origin), recipe, _ in found])
    if len(found) < 2:
        which = "no run" if seeds is None else "no run of these seeds"
        what = f"all runs are of one recipe ({labels[0]})" if found else f"{which} has ended"
        raise ConfigError(f"{what}; name runs of two recipes or more.")
    return [_side(label, members) for label, (*_, members) in zip(labels, found, strict=True)]


def _side(label: str, numbers: dict[int, tuple[float, int]]) -> Side:
    seeds = sorted(numbers)
    return Side(label, {seed: numbers[seed][0] for seed in seeds}, {seed: numbers[seed][1] for seed in seeds})


def _kind(recipe: Recipe, path: Path) -> tuple[Recipe, str]:
    """What runs of one side have in common.

    Wirings that were given, such as learned ones that are trained again, are of one kind if the names of their folders
    differ in the seed only.
    """
    plain = without_seed(recipe)
    if isinstance(recipe.model.connectivity, str):
        return plain, ""
    origin = re.sub(r"[-_]?seed=?\d+", "", path.name.removesuffix(".json"))
    return replace(plain, model=replace(plain.model, connectivity="full")), origin or "given"


def _name(recipe: Recipe, origin: str) -> str:
    return wiring_name(recipe.model) if not origin else f"{wiring_name(recipe.model)} ({origin})"
