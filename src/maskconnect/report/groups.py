"""Runs that differ in nothing but their seed, together: means and spreads over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskconnect.recipes.naming import labels_of, without_seed
from maskconnect.recipes.schema import Paper, Recipe
from maskconnect.report.runs import Run
from maskconnect.training.statistics import Statistic, statistic


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
        plain = without_seed(run.recipe)
        same = next((members for recipe, members in kept if recipe == plain), None)
        if same is None:
            kept.append((plain, [run]))
        else:
            same.append(run)
    firsts = [members[0] for _, members in kept]
    recipes = [recipe for recipe, _ in kept]
    families = [replace(recipe, model=replace(recipe.model, fan_in=1)) for recipe in recipes]
    labels = labels_of(recipes, [run.wiring for run in firsts])
    kinds = labels_of(families, [run.kind for run in firsts])
    found = [Group(a, b, tuple(members)) for a, b, (_, members) in zip(labels, kinds, kept, strict=True)]
    return [group if group.ended else replace(group, label=f"{group.label}, not ended") for group in found]
