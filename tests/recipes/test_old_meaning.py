"""What version 0.1 wrote keeps its meaning: a recipe, result or run that names no aggregation is of the old join."""

import json
import re
from pathlib import Path

import pytest
import runs
import torch

import maskconnect as mc
from maskconnect.experiments.kept import key_of, of_file
from maskconnect.models import build, read_spec
from maskconnect.recipes import load, write
from maskconnect.recipes.fields import read
from maskconnect.recipes.schema import Recipe
from maskconnect.training.stop import Stopped

EVIDENCE = Path(__file__).parents[2] / "docs/evidence"
KEPT = sorted(path for path in EVIDENCE.rglob("*.json") if path.parent.name != "benchmarks")
OLD_JOINS = {"resnet": "mean", "resnext": "residual"}


def test_there_are_kept_results():
    assert len(KEPT) > 500


@pytest.mark.parametrize("folder", sorted({path.parent for path in KEPT}), ids=lambda folder: folder.name)
def test_every_kept_result_names_its_join_and_is_the_same_run_without_that_name_if_it_is_old(folder):
    for path in folder.glob("*.json"):
        recipe = json.loads(path.read_text())["recipe"]
        join = recipe["model"].pop("aggregation")
        if join == OLD_JOINS[recipe["model"]["architecture"]]:
            assert key_of(read(Recipe, recipe)) == key_of(of_file(path).recipe), path.name


def old_toml(recipe):
    """A recipe as version 0.1 wrote it."""
    text, count = re.subn(r"(?m)^aggregation = .*\n", "", write(recipe))
    assert count == 1
    return text


@pytest.mark.parametrize("name", ["quick/digits", "quick/cifar100-resnext"])
def test_a_recipe_that_names_no_join_has_the_old_one(name, tmp_path):
    recipe = load(name)
    join = OLD_JOINS[recipe.model.architecture]
    recipe = load(name, [f"model.aggregation={join}"])
    (tmp_path / "old.toml").write_text(old_toml(recipe))
    old = load(str(tmp_path / "old.toml"))
    assert old == recipe
    assert old.model.spec(num_classes=10, in_channels=3, seed=0).aggregation == join


class Interrupting(runs.Silent):
    """Stops the run at its third progress."""

    seen = 0

    def progress(self, progress):
        self.seen += 1
        if self.seen == 3:
            raise Stopped(2)


def test_a_run_that_version_0_1_began_goes_on_as_it_was(tmp_path):
    recipe = runs.tiny(tmp_path, "model.aggregation=mean")
    whole = runs.run(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        runs.run(recipe, tmp_path / "old", Interrupting())
    place = tmp_path / "old/recipe.toml"
    place.write_text(old_toml(load(str(place))))
    resumed = runs.run(load(str(place)), tmp_path / "old")
    assert resumed["test"] == whole["test"]
    assert runs.results(tmp_path / "old")[0] == runs.results(tmp_path / "whole")[0]


def test_a_network_that_version_0_1_saved_is_built_with_its_join():
    described = {
        **{"family": "resnet", "depth": 14, "num_classes": 7, "fan_in": 2, "connectivity": "random"},
        **{"aggregation": "mean", "stem": "cifar", "in_channels": 3, "mask_init": "uniform", "mask_credit": "whole"},
        **{"use_all": False, "seed": 5},
    }
    torch.manual_seed(0)
    old = build(read_spec(described))
    torch.manual_seed(0)
    new = mc.resnet(14, 7, 2, connectivity="random", aggregation="mean", seed=5)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(old(x), new(x))
    assert old.state_dict().keys() == new.state_dict().keys()
