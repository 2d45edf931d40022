"""The reference page has every field of the schema, and what it says of limits is so."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

import maskconnect as mc
from maskconnect.data.augment import Augmentation
from maskconnect.recipes import load
from maskconnect.recipes.reference import markdown, meanings
from maskconnect.recipes.schema import Data, LearningTable, Network, Paper, Phase, Recipe, Training

TABLES = {
    **{"paper": Paper, "data": Data, "augmentation": Augmentation, "model": Network},
    **{"training": Training, "learning": LearningTable, "phase": Phase},
}


def rows(section):
    """The rows of a section, by field: type and allowed values, default, meaning."""
    text = next(part for part in markdown().split("\n## ")[1:] if part.startswith(section))
    cells = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): [cell.strip() for cell in row[2:-1]] for row in cells}


@pytest.mark.parametrize(("name", "kind"), TABLES.items())
def test_every_field_has_a_type_a_default_and_a_meaning(name, kind):
    found = rows(f"`[[{name}]]`" if name == "phase" else f"`[{name}]`")
    assert list(found) == [field.name for field in fields(kind)]
    assert all(all(cells) for cells in found.values())


def test_fields_without_a_table_come_first():
    assert [field.name for field in fields(Recipe)] == ["name", "about", "seed", "init_from", *TABLES]
    assert list(rows("Top level")) == ["name", "about", "seed", "init_from"]
    assert set(meanings(Recipe)) == {field.name for field in fields(Recipe)}


def test_a_meaning_is_one_sentence_on_one_line():
    for kind in (Recipe, *TABLES.values()):
        for field, meaning in meanings(kind).items():
            assert meaning.endswith("."), field
            assert "\n" not in meaning, field


def test_types_allowed_values_and_defaults_are_those_of_the_schema():
    assert rows("`[data]`")["labels"][:2] == ['a string: `"fine"`, `"coarse"`', '`"fine"`']
    assert rows("`[model]`")["fan_in"][:2] == ['an integer: 1 or more; or `"none"`', '`"none"`']
    assert rows("`[model]`")["use_all"][:2] == ["true or false", "`false`"]
    assert rows("`[training]`")["batch_size"][:2] == ["an integer: 1 or more", "required"]


NOT_ALONE = ("phase.mask_lr",)
"""Fields whose minimum does not fit the rest of the recipe."""
LEAST = [
    (f"{name}.{field}", int(least[1]))
    for name in ("data", "augmentation", "model", "training", "phase")
    for field, (kind, *_) in rows(f"`[[{name}]]`" if name == "phase" else f"`[{name}]`").items()
    if (least := re.search(r": (\d) or more", kind)) and field not in ("depth", "width", "cardinality")
]


@pytest.mark.parametrize(("field", "least"), LEAST)
def test_a_stated_minimum_is_the_minimum(field, least):
    path = field.replace("phase.", "phase.learn.")
    with pytest.raises(mc.ConfigError, match=re.escape(field.rpartition(".")[2])):
        load("quick/cifar10", [f"{path}={least - 1}"])
    if field not in NOT_ALONE:
        load("quick/cifar10", [f"{path}={least}"])


def test_the_module_prints_the_page():
    run = [sys.executable, "-m", "maskconnect.recipes.reference"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == markdown()
