"""A grid of runs: one recipe over several values of some fields, and several seeds. A cell is one run."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskconnect.core.checks import warn_of_fan_in
from maskconnect.errors import ConfigError, cut, shown
from maskconnect.recipes import Recipe, load, write

MAX_CELLS = 100_000
"""The largest grid; a larger one is likely a mistake."""

MAX_NAME = 120
"""The longest folder name, in bytes."""

PART = r'(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|"[^"]*"|[^,\["])+'
"""A value, up to the next comma outside of brackets and quotation marks."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid."""

    name: str  # of its folder
    source: str  # the recipe, by name or file
    settings: tuple[str, ...]  # the values of `maskconnect train --set`
    values: tuple[str, ...]  # of the fields that the grid varies
    recipe: Recipe
    extra: tuple[str, ...] = ()  # further arguments of `maskconnect train`
    label: str = ""  # its name in tables, if that does not follow from the recipe


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A description of all runs."""

    recipe: str  # a name, or a file
    settings: tuple[str, ...] = ()  # the same in all cells
    over: tuple[tuple[str, tuple[str, ...]], ...] = ()  # fields, and the values of each
    seeds: tuple[int, ...] = (0,)

    def cells(self) -> list[Cell]:
        """Return every combination of values with every seed; all are checked before the first is run."""
        fields = [field for field, _ in self.over]
        if len(set(fields)) < len(fields):
            raise ConfigError(f"the sweep varies {', '.join(fields)}; name each field once.")
        if "seed" in [*fields, *(setting.partition("=")[0].strip() for setting in self.settings)]:
            raise ConfigError("seed is set with --over or --set; use --seeds instead.")
        combinations = list(itertools.product(*(values for _, values in self.over)))
        if (count := len(combinations) * len(self.seeds)) > MAX_CELLS:
            raise ConfigError(f"the grid has {count:,} runs; the limit is {MAX_CELLS:,}. Use fewer values or seeds.")
        cells = [self._cell(values, seed) for values in combinations for seed in self.seeds]
        _check_distinct(cells)
        _check_fan_in([cell.recipe for cell in cells])
        return cells

    def _cell(self, values: tuple[str, ...], seed: int) -> Cell:
        chosen = [f"{field}={value}" for (field, _), value in zip(self.over, values, strict=True)]
        settings = (*self.settings, *chosen)
        try:
            recipe = replace(load(self.recipe, settings), seed=seed)
        except ConfigError as error:
            said = str(error)
            for setting in chosen:  # the loader reports every setting as one of --set
                said = said.replace(f"--set {setting}", f"--over {setting}")
            for value in filter(re.compile(r"\d+-\d+").fullmatch, values):
                wrong = f"is {value!r}; it must be an integer"
                said = said.replace(wrong, f"{wrong}, or a range such as {value.replace('-', '..')}")
            raise ConfigError(said) from None
        words = [f"{self._short(field)}={value}" for (field, _), value in zip(self.over, values, strict=True)]
        name = folder_name("_".join([*words, f"seed={seed}"]))
        return Cell(name=name, source=self.recipe, settings=settings, values=values, recipe=recipe)

    def _short(self, field: str) -> str:
        """Return the last word of a field, or all of it if another field ends in the same word."""
        last = field.rpartition(".")[2]
        ends = [other.rpartition(".")[2] for other, _ in self.over]
        return last if ends.count(last) == 1 else field


def folder_name(text: str) -> str:
    """Turn a text into a folder name: replace unusual characters with hyphens, and cut a long text."""
    name = re.sub(r"[^\w.,=+-]", "-", text)
    return name if len(name.encode()) <= MAX_NAME else f"{name[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_distinct(cells: Sequence[Cell]) -> None:
    """Fail if two cells are the same run, or would have the same folder."""
    known: dict[str, Cell] = {}
    for cell in cells:
        for key in (cell.name, write(replace(cell.recipe, about="", paper=None))):
            other = known.setdefault(key, cell)
            if other is not cell:
                both = " and ".join(f"{', '.join(c.values)} (seed {c.recipe.seed})" for c in (other, cell))
                raise ConfigError(
                    f"two runs are equal, or would have the same folder: {both}. Remove one of the values."
                )


def _check_fan_in(recipes: Sequence[Recipe]) -> None:
    """Fail if several K exceed the number of candidates of every block in every run, so that the networks are equal.

    A single one is a warning. For some blocks it may be larger (D5).
    """
    models = dict.fromkeys(recipe.model for recipe in recipes if recipe.model.connectivity in ("learned", "random"))
    candidates = {model: model.layout().candidates() for model in models}
    most = max((len(row) for rows in candidates.values() for row in rows), default=0)
    fan_ins = {model.fan_in for model in models if model.fan_in is not None}
    above = sorted(k for k in fan_ins if k > most > 0)
    if above and len(fan_ins) > 1:
        found = f"{above[0]} to {above[-1]} exceed" if len(above) > 1 else f"{above[0]} exceeds"
        raise ConfigError(f"fan_in {found} the {most} candidates of the largest target; use 1..{most}.")
    for model, rows in candidates.items():
        warn_of_fan_in(model.fan_in, rows, what="model.fan_in")


def values_of(text: str, what: str) -> tuple[str, ...]:
    """Parse values such as `1..17`, `0.1,0.3` or `1,2,5..8`; commas in brackets or quotes do not separate."""
    found: list[str] = []
    for part in map(str.strip, re.findall(PART, text)):
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", part):
            first, last = map(int, match.groups())
            if last < first:
                raise ConfigError(
                    f"{what} {cut(text)}: {cut(part)} is not a range; write the smaller number first, such as 1..8."
                )
            if last - first > MAX_CELLS:
                raise ConfigError(f"{what} {cut(text)}: {cut(part)} has more than {MAX_CELLS:,} values; use fewer.")
            found += map(str, range(first, last + 1))
        elif part:
            found.append(part)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{what} is {shown(text)}; it must be values such as 1..17 or 0.1,0.3, each once.")
    return tuple(found)


def field_and_values(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse `phase.learn.mask_lr=0.1,0.3` into a field and its values."""
    field, equals, values = text.partition("=")
    if not equals or not field.strip():
        raise ConfigError(f"--over is {shown(text)}; it must be FIELD=VALUES, such as phase.learn.mask_lr=0.1,0.3.")
    return field.strip(), values_of(values, f"--over {field.strip()}")


def seeds_of(text: str) -> tuple[int, ...]:
    """Parse seeds: `4` means seeds 0 to 3; `0,7` and `2..5` mean those seeds."""
    if not re.fullmatch(r"[\d.,\s]+", text):
        raise ConfigError(
            f"--seeds is {shown(text)}; it must be a number of seeds, such as 4, or a list, such as 2..5 or 0,7."
        )
    if text.strip().isdigit():
        count = int(text)
        if not 1 <= count <= MAX_CELLS:
            raise ConfigError(f"--seeds is {count}; it must be from 1 to {MAX_CELLS:,}.")
        return tuple(range(count))
    found = values_of(text, "--seeds")
    if not all(value.isdigit() for value in found):
        raise ConfigError(f"--seeds is {shown(text)}; it must be integers, such as 2..5 or 0,7.")
    return tuple(dict.fromkeys(map(int, found)))
