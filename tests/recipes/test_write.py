import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskconnect.recipes import load, write
from maskconnect.recipes.schema import Paper

BASE = load("quick/digits")


def header(recipe, *command):
    return [line for line in write(recipe, *command).splitlines() if line.startswith("#")]


@given(st.text(), st.text(), st.floats(min_value=0, max_value=1e300))
def test_any_text_and_number_comes_back(text, name, number):
    phase = replace(BASE.phase[0], name=name, lr=number)
    recipe = replace(BASE, about=text, name=name, paper=Paper(where=text, accuracy=number), phase=(phase,))
    found = tomllib.loads(write(recipe))
    assert (found["about"], found["name"], found["paper"]["where"]) == (text, name, text)
    assert (found["phase"][0]["name"], found["phase"][0]["lr"], found["paper"]["accuracy"]) == (name, number, number)
    assert type(found["phase"][0]["lr"]) is float


@pytest.mark.parametrize(
    "settings",
    [
        [f"model.connectivity={[[], *([k] for k in range(8))]}"],
        ["model.mask_init=0.5", "init_from=runs/one", "data.train_images=100", "training.norm_group=8"],
        ["augmentation.mean=[0.1]", "augmentation.std=[1]", "training.nesterov=true"],
    ],
)
def test_settings_are_written_and_come_back(settings, tmp_path):
    recipe = load("quick/digits", settings)
    path = tmp_path / "again.toml"
    path.write_text(write(recipe))
    assert load(str(path)) == recipe != BASE


def test_the_wiring_of_branches_comes_back(tmp_path):
    wiring = [[[]] * 8, *[[[0, 1]] * 8] * 5]
    recipe = load("quick/cifar10-resnext", [f"model.connectivity={wiring}"])
    path = tmp_path / "again.toml"
    path.write_text(write(recipe))
    assert load(str(path)).model.connectivity == wiring


def test_every_field_that_is_set_is_written():
    found = tomllib.loads(write(load("paper/cifar100-resnet38-learned")))
    assert found["model"] == {
        **{"architecture": "resnet", "depth": 38, "fan_in": 10, "connectivity": "learned"},
        **{"aggregation": "mean", "stem": "cifar", "mask_init": "uniform", "use_all": False},
    }
    assert found["learning"] == {
        **{"way": "draw", "gradient": "plain", "credit": "whole"},
        **{"temperature": 1.0, "cool": False},
    }
    assert found["phase"][1] == {"name": "freeze", "epochs": 30, "lr": 0.1, "mask_lr": 0.0}
    head = ["name", "about", "seed", "paper"]
    assert list(found) == [*head, "data", "augmentation", "model", "training", "learning", "phase"]


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("paper/cifar100-resnet38-learned", "# Paper, table 1: 70.40 %."),
        (
            "paper/cifar100-resnext29-8-8-learned-k4",
            "# Paper, table 2: 75.89 %, the best of its runs; mean 75.77 +- 0.12.",
        ),
        ("paper/imagenet-resnext50-4-32-full", "# Paper, table 3: 77.80 %, top-5 93.30 %."),
        ("paper/cifar100-resnext20-4-8-learned", "# Paper, figure 3: no accuracy is stated."),
    ],
)
def test_the_header_says_what_it_is_what_the_paper_reports_and_how_to_run_it(name, claim):
    recipe = load(name)
    assert header(recipe) == [f"# {recipe.about}", claim, f"# maskconnect train {name}"]


def test_the_header_without_a_paper_and_with_another_command():
    assert header(BASE) == [f"# {BASE.about}", "# maskconnect train quick/digits"]
    assert header(replace(BASE, about="", name="mine"), "maskconnect train mine.toml") == [
        "# mine",
        "# maskconnect train mine.toml",
    ]
    assert header(replace(BASE, about="one\ntwo = 3"))[0] == "# one two = 3"
