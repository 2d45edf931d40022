"""Runs that differ in nothing but their seed, together: means and spreads over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from maskconnect.recipes import write
from maskconnect.recipes.schema import Paper, Recipe
from maskconnect.recipes.write import assignments
from maskconnect.report.runs import Run

FIELDS = 3
"""How many fields a label names, if it needs any."""


@dataclass(frozen=True)
class Statistic:
    """What several runs have in common."""

    count: int
    mean: float
    deviation: float | None  # of a sample; None where there is one run only

    def text(self, digits: int = 2) -> str:
        """As people write it."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def statistic(values: Sequence[float]) -> Statistic:
    """The mean, and the standard deviation of a sample."""
    return Statistic(len(values), fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, each with its own seed."""

    label: str
    kind: str  # the label without K: what one sweep of K is called
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """One of them, for what they have in common."""
        return self.runs[0]

    @property
    def ended(self) -> tuple[Run, ...]:
        """Those that have a result, one for each seed."""
        return tuple({run.recipe.seed: run for run in reversed(self.runs) if run.summary is not None}.values())[::-1]

    @property
    def shown(self) -> tuple[Run, ...]:
        """Those that statistics are of: all that have ended or, if none has, those under way."""
        return self.ended or self.runs

    @property
    def accuracy(self) -> Statistic | None:
        """Of the last epoch, on test images (D12); None where no run has ended."""
        found = [run.summary["test"]["top1"] for run in self.ended if run.summary is not None]
        return statistic(found) if found else None

    @property
    def paper(self) -> Paper | None:
        """What the paper says of this network."""
        return next((run.recipe.paper for run in self.runs if run.recipe.paper is not None), None)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The runs by recipe, in the order in which they came; labels say in what they differ."""
    kept: list[tuple[Recipe, list[Run]]] = []
    for run in runs:
        plain = replace(run.recipe, seed=0, name="", about="", paper=None)
        same = next((members for recipe, members in kept if recipe == plain), None)
        if same is None:
            kept.append((plain, [run]))
        else:
            same.append(run)
    firsts = [members[0] for _, members in kept]
    recipes = [recipe for recipe, _ in kept]
    families = [replace(recipe, model=replace(recipe.model, fan_in=1)) for recipe in recipes]
    labels = _told_apart(_named(firsts, [run.wiring for run in firsts]), recipes)
    kinds = _told_apart(_named(firsts, [run.kind for run in firsts]), families)
    found = [Group(a, b, tuple(members)) for a, b, (_, members) in zip(labels, kinds, kept, strict=True)]
    return [group if group.ended else replace(group, label=f"{group.label}, not ended") for group in found]


def _named(runs: Sequence[Run], wirings: Sequence[str]) -> list[str]:
    """Each wiring, with its data set and network where those differ."""
    parts = [run.recipe.data.name for run in runs], [run.network for run in runs]
    shown = [part for part in parts if len(set(part)) > 1]
    return [", ".join(words) for words in zip(*shown, wirings, strict=True)]


def _told_apart(names: Sequence[str], recipes: Sequence[Recipe]) -> list[str]:
    """Names, with the fields in which recipes of the same name differ."""
    found = []
    for name, recipe in zip(names, recipes, strict=True):
        own = assignments(write(recipe))
        others = [assignments(write(r)) for n, r in zip(names, recipes, strict=True) if n == name and r != recipe]
        keys = [key for key in own if any(other.get(key) != own[key] for other in others)]
        found.append(f"{name} ({', '.join(f'{key}={own[key]}' for key in keys[:FIELDS])})" if keys else name)
    return found
