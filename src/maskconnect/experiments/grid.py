"""A grid of runs: one recipe, some of its fields over several values, and seeds; a cell is a run of it."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskconnect.core.checks import warn_of_fan_in
from maskconnect.errors import ConfigError, cut, shown
from maskconnect.recipes import Recipe, load, write

MOST = 100_000
"""How many cells a grid may have; more were surely not meant."""

LONGEST = 120
"""How many bytes the name of a folder may have."""

PART = r'(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|"[^"]*"|[^,\["])+'
"""A value: up to the next comma that is neither in brackets nor in quotation marks."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid."""

    name: str  # of its folder
    source: str  # the recipe, by name or file
    settings: tuple[str, ...]  # what `maskconnect train --set` is given
    values: tuple[str, ...]  # of the fields that the grid goes over
    recipe: Recipe
    extra: tuple[str, ...] = ()  # what else `maskconnect train` is given
    label: str = ""  # what a table calls it, where that does not follow from the recipe


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to run."""

    recipe: str  # a name, or a file
    settings: tuple[str, ...] = ()  # the same in all cells
    over: tuple[tuple[str, tuple[str, ...]], ...] = ()  # fields, and the values of each
    seeds: tuple[int, ...] = (0,)

    def cells(self) -> list[Cell]:
        """Every combination of values, with every seed; all are checked before the first is run."""
        fields = [field for field, _ in self.over]
        if len(set(fields)) < len(fields):
            raise ConfigError(f"the sweep goes over {', '.join(fields)}; name each field once.")
        if "seed" in [*fields, *(setting.partition("=")[0].strip() for setting in self.settings)]:
            raise ConfigError("seed is given by --over or --set; give seeds by --seeds.")
        combinations = list(itertools.product(*(values for _, values in self.over)))
        if len(combinations) * len(self.seeds) > MOST:
            raise ConfigError(f"the grid has {len(combinations) * len(self.seeds):,} cells; that is surely not meant.")
        cells = [self._cell(values, seed) for values in combinations for seed in self.seeds]
        _check_apart(cells)
        return cells

    def _cell(self, values: tuple[str, ...], seed: int) -> Cell:
        chosen = [f"{field}={value}" for (field, _), value in zip(self.over, values, strict=True)]
        settings = (*self.settings, *chosen)
        try:
            recipe = replace(load(self.recipe, settings), seed=seed)
        except ConfigError as error:
            said = str(error)
            for setting in chosen:  # the loader takes every setting for one of --set
                said = said.replace(f"--set {setting}", f"--over {setting}")
            raise ConfigError(said) from None
        _check_fan_in(recipe)
        words = [f"{self._short(field)}={value}" for (field, _), value in zip(self.over, values, strict=True)]
        name = folder_name("_".join([*words, f"seed={seed}"]))
        return Cell(name=name, source=self.recipe, settings=settings, values=values, recipe=recipe)

    def _short(self, field: str) -> str:
        """The last word of a field, or all of it where another ends in the same word."""
        last = field.rpartition(".")[2]
        ends = [other.rpartition(".")[2] for other, _ in self.over]
        return last if ends.count(last) == 1 else field


def folder_name(text: str) -> str:
    """A text as the name of a folder: other letters become hyphens, and a long one is cut."""
    name = re.sub(r"[^\w.,=+-]", "-", text)
    return name if len(name.encode()) <= LONGEST else f"{name[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_apart(cells: Sequence[Cell]) -> None:
    """No two cells may be the same run, or have the same folder."""
    known: dict[str, Cell] = {}
    for cell in cells:
        for key in (cell.name, write(replace(cell.recipe, about="", paper=None))):
            other = known.setdefault(key, cell)
            if other is not cell:
                both = " and ".join(f"{', '.join(c.values)} (seed {c.recipe.seed})" for c in (other, cell))
                raise ConfigError(f"two cells are the same run, or would have the same folder: {both}.")


def _check_fan_in(recipe: Recipe) -> None:
    """K may be larger than what some blocks have to choose from (D5); where it is for all, say so."""
    if recipe.model.connectivity in ("learned", "random"):
        warn_of_fan_in(recipe.model.fan_in, recipe.model.layout().candidates(), what="model.fan_in")


def values_of(text: str, what: str) -> tuple[str, ...]:
    """Values as people write them: `1..17`, `0.1,0.3`, `1,2,5..8`; commas in brackets or quotes are no ends."""
    found: list[str] = []
    for part in map(str.strip, re.findall(PART, text)):
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", part):
            first, last = map(int, match.groups())
            if last < first:
                raise ConfigError(
                    f"{what} {cut(text)}: {cut(part)} is no range; write the smaller number first, such as 1..8."
                )
            if last - first > MOST:
                raise ConfigError(f"{what} {cut(text)}: {cut(part)} is a range of more than {MOST:,} values.")
            found += map(str, range(first, last + 1))
        elif part:
            found.append(part)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{what} is {shown(text)}; it must be values such as 1..17 or 0.1,0.3, each once.")
    return tuple(found)


def field_and_values(text: str) -> tuple[str, tuple[str, ...]]:
    """`phase.learn.mask_lr=0.1,0.3` as a field and its values."""
    field, equals, values = text.partition("=")
    if not equals or not field.strip():
        raise ConfigError(f"--over {cut(text)}: needed is FIELD=VALUES, such as phase.learn.mask_lr=0.1,0.3.")
    return field.strip(), values_of(values, f"--over {field.strip()}")


def seeds_of(text: str) -> tuple[int, ...]:
    """`4` is four seeds from 0 on; `0,7` and `2..5` are just those."""
    if not re.fullmatch(r"[\d.,\s]+", text):
        raise ConfigError(f"--seeds is {shown(text)}; it must be how many, such as 4, or which, such as 2..5 or 0,7.")
    if text.strip().isdigit():
        count = int(text)
        if not 1 <= count <= MOST:
            raise ConfigError(f"--seeds is {count}; it must be 1 or more, and {MOST:,} at most.")
        return tuple(range(count))
    found = values_of(text, "--seeds")
    if not all(value.isdigit() for value in found):
        raise ConfigError(f"--seeds is {shown(text)}; it must be whole numbers.")
    return tuple(dict.fromkeys(map(int, found)))
