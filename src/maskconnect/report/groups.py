"""Groups of runs that differ only in their seed: means and standard deviations over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskconnect.recipes.naming import labels_of, without_seed
from maskconnect.recipes.schema import Paper, Recipe
from maskconnect.report.history import Run
from maskconnect.report.runs import TrainedRun
from maskconnect.training.statistics import Statistic, statistic


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, each with its own seed."""

    label: str
    kind: str  # the label without K: the name of a sweep over K
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """One of the runs, for what all have in common."""
        return self.runs[0]

    @property
    def ended(self) -> tuple[Run, ...]:
        """The runs that have a result, one per seed."""
        done = [run for run in reversed(self.runs) if run.summary is not None]
        return tuple({run.recipe.seed if isinstance(run, TrainedRun) else 0: run for run in done}.values())[::-1]

    @property
    def shown(self) -> tuple[Run, ...]:
        """The runs that statistics are over: all that have ended or, if none has, all."""
        return self.ended or self.runs

    @property
    def accuracy(self) -> Statistic | None:
        """On test images, after the last epoch (D12); None where no run has ended."""
        found = [run.test_accuracy for run in self.ended if run.test_accuracy is not None]
        return statistic(found) if found else None

    @property
    def paper(self) -> Paper | None:
        """The result of the paper for this network."""
        trained = (run.recipe.paper for run in self.runs if isinstance(run, TrainedRun))
        return next((paper for paper in trained if paper is not None), None)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The runs by recipe, in the order given, with labels that say how recipes differ; recorded runs stay alone."""
    kept: list[tuple[Recipe | None, list[Run]]] = []
    for run in runs:
        plain = without_seed(run.recipe) if isinstance(run, TrainedRun) else None
        same = next((members for recipe, members in kept if recipe == plain and plain is not None), None)
        if same is None:
            kept.append((plain, [run]))
        else:
            same.append(run)
    recipes = [recipe for recipe, _ in kept if recipe is not None]
    firsts = [members[0] for recipe, members in kept if recipe is not None]
    families = [replace(recipe, model=replace(recipe.model, fan_in=1)) for recipe in recipes]
    labels = iter(labels_of(recipes, [run.wiring for run in firsts]))
    kinds = iter(labels_of(families, [run.kind for run in firsts]))
    found = [
        _recorded(members[0]) if recipe is None else Group(next(labels), next(kinds), tuple(members))
        for recipe, members in kept
    ]
    return [group if group.ended else replace(group, label=f"{group.label}, not ended") for group in found]


def _recorded(run: Run) -> Group:
    """A run without a recipe, under the name of its folder."""
    label = f"{run.wiring} ({run.name})"
    return Group(label, label, (run,))
