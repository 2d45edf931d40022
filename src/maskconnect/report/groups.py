"""Runs that differ in nothing but their seed, together: means and spreads over seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from maskconnect.recipes.schema import Recipe
from maskconnect.report.runs import Run


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
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """One of them, for what they have in common."""
        return self.runs[0]

    @property
    def ended(self) -> tuple[Run, ...]:
        """Those that have a result."""
        return tuple(run for run in self.runs if run.summary is not None)

    @property
    def accuracy(self) -> Statistic | None:
        """Of the last epoch, on test images (D12); None where no run has ended."""
        found = [run.summary["test"]["top1"] for run in self.runs if run.summary is not None]
        return statistic(found) if found else None


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
    labels = _labels(firsts)
    return [Group(label, tuple(members)) for label, (_, members) in zip(labels, kept, strict=True)]


def _labels(runs: Sequence[Run]) -> list[str]:
    """The wiring; with data and network where they differ, and the recipe or folder where that is not enough."""
    several_data = len({run.recipe.data.name for run in runs}) > 1
    several_networks = len({run.network for run in runs}) > 1
    labels = []
    for run in runs:
        parts = [run.recipe.data.name] * several_data + [run.network] * several_networks + [run.wiring]
        labels.append(", ".join(parts))
    for extra in ("recipe", "folder"):
        often = Counter(labels)
        names = [run.recipe.name if extra == "recipe" else run.name for run in runs]
        labels = [f"{a} ({b})" if often[a] > 1 else a for a, b in zip(labels, names, strict=True)]
    return labels
