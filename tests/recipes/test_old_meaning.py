"""What version 0.1 wrote keeps its meaning, or says what to do."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from new_format import RemovedError, converted
from new_format import main as convert

import maskconnect as mc
from maskconnect.cli.main import main
from maskconnect.experiments.kept import of_file
from maskconnect.models import build, read_spec
from maskconnect.recipes import load, write
from maskconnect.training.stop import Stopped

EVIDENCE = Path(__file__).parents[2] / "research/evidence"
KEPT = sorted(path for path in EVIDENCE.rglob("*.json") if path.parent.name not in ("archive", "benchmarks"))
DIGESTS = (Path(__file__).parent / "format1.txt").read_text().split()
"""A checksum of every result as version 0.1 read it: its whole recipe, its numbers and its wiring."""


def in_format_1(recipe):
    """A recipe as version 0.1 wrote it, learning and all; written apart from `tools/new_format.py`."""
    how, learned = recipe.learning, []
    text = re.sub(r"(?ms)^\[learning\]\n.*?\n\n", "", write(recipe))
    text = re.sub(r"(?m)^use_all", f'mask_credit = "{how.credit}"\n\\g<0>', text)
    text = re.sub(r"(?m)^nesterov.*\n", f'\\g<0>mask_gradient = "{how.gradient}"\nmask_momentum = 0.0\n', text)
    blend = how.way == "blend"
    for phase in recipe.phase:
        lines = ["temperature = 1.0", "blend = false", "even = 0.0"]
        if phase.mask_lr:
            cool = ["cool_to = 0.0"] if blend or how.cool else []
            floor = how.uniform_floor if blend else 0.0
            temperature = 1.0 if blend else how.temperature
            lines = [f"temperature = {temperature}", *cool, f"blend = {str(blend).lower()}", f"even = {floor}"]
        learned.append("\n".join(lines))
    rows = iter(learned)
    return re.sub(r"(?m)^mask_lr = .*\n", lambda match: f"{match[0]}{next(rows)}\n", text)


def digest(path):
    content = json.loads(path.read_text())
    text = in_format_1(replace(of_file(path).recipe, about="", paper=None))
    rest = json.dumps([content[key] for key in ("summary", "images", "wiring", "starts")], sort_keys=True)
    return hashlib.sha256((text + rest).encode()).hexdigest()[:16]


def test_every_result_that_version_0_1_kept_means_what_it_did():
    archived = len(list((EVIDENCE / "archive").glob("*.json")))
    assert len(DIGESTS) > 700
    assert len(set(DIGESTS) - {digest(path) for path in KEPT}) == archived == 6


def test_archived_results_have_an_option_that_was_removed_and_are_not_compared(capsys):
    for path in (EVIDENCE / "archive").glob("*.json"):
        with pytest.raises(RemovedError):
            converted(json.loads(path.read_text())["recipe"])
    assert main(["compare", str(EVIDENCE / "archive")]) == 2
    assert "tools/new_format.py of the repository converts it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quick/digits", "quick/cifar100-strong", "quick/cifar10-resnext-strong"])
def test_a_recipe_of_version_0_1_is_converted(name, tmp_path, capsys):
    place = tmp_path / "recipe.toml"
    place.write_text(in_format_1(load(name)))
    with pytest.raises(mc.ConfigError, match=r"is now learning\.\w+"):
        load(str(place))
    assert convert([str(tmp_path)]) == 0
    assert load(str(place)) == load(name)
    assert convert([str(tmp_path)]) == 0  # a second time changes nothing
    assert load(str(place)) == load(name)


@pytest.mark.parametrize(
    "text",
    [
        'base = "quick/digits"\n[phase.learn]\nblend = true\n',
        '[variant.one]\nbase = "quick/digits"\nmodel = { mask_credit = "new" }\n',
    ],
)
def test_a_recipe_that_builds_on_others_is_to_be_changed_by_hand(text, tmp_path, capsys):
    (tmp_path / "own.toml").write_text(text)
    assert convert([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "own.toml by hand" in said
    assert "the new names are learning." in said
    assert (tmp_path / "own.toml").read_text() == text


def test_what_is_not_there_cannot_be_converted(tmp_path, capsys):
    assert convert([str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist; name a file or folder to convert." in capsys.readouterr().err


class Interrupting(runs.Silent):
    """Stops the run at its third progress."""

    seen = 0

    def progress(self, progress):
        self.seen += 1
        if self.seen == 3:
            raise Stopped(2)


def test_a_run_that_version_0_1_began_continues_once_its_recipe_is_converted(tmp_path):
    recipe = runs.tiny(tmp_path)
    whole = runs.run(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        runs.run(recipe, tmp_path / "old", Interrupting())
    place = tmp_path / "old/recipe.toml"
    place.write_text(in_format_1(load(str(place))))
    assert convert([str(place)]) == 0
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


def test_masks_that_version_0_1_saved_have_no_progress_and_are_loaded():
    stack = mc.MaskedStack([torch.nn.Linear(3, 3) for _ in range(4)], 2)
    stack.masks.freeze()
    state = stack.state_dict()
    del state["masks.progress"]
    state["masks._extra_state"] = stack.masks.generator.get_state()
    again = mc.MaskedStack([torch.nn.Linear(3, 3) for _ in range(4)], 2)
    again.load_state_dict(state)
    assert again.wiring() == stack.wiring()
