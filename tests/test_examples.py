"""The same code learns the wiring of an MLP, of a transformer encoder and of a conv net."""

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path

import exclusive_or
import pytest

import maskconnect as mc

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def load(name):
    (path,) = [path for path in EXAMPLES if path.stem == name]
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path):
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert "reads" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("how", [{}, {"blend": False, "mask_lr": 0.1}], ids=["blended", "as in the paper"])
@pytest.mark.parametrize("seed", range(5))
def test_learning_finds_exactly_the_two_of_eight_sources_that_carry_signal(seed, how):
    example = load("mlp")
    model, accuracy = example.train(seed=seed, **how)
    assert mc.wiring_of(model)[1] == [list(example.SIGNAL)]
    assert accuracy > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_without_the_mask_update_it_finds_them_not(seed):
    example = load("mlp")
    model, accuracy = example.train(seed=seed, mask_lr=0.0)
    assert mc.wiring_of(model)[1] != [list(example.SIGNAL)]
    assert accuracy < 0.6


def test_blending_finds_sources_that_matter_only_together_and_draws_do_not(monkeypatch):
    example = load("mlp")
    monkeypatch.setattr(example, "batch", partial(exclusive_or.batch, pair=example.SIGNAL))
    model, accuracy = example.train(steps=1000)
    assert mc.wiring_of(model)[1] == [list(example.SIGNAL)]
    assert accuracy > 0.9
    assert example.train(steps=1000, blend=False, mask_lr=0.1)[1] < 0.6


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_a_wiring_is_learned_frozen_and_of_use(name):
    model, accuracy = load(name).train()
    (stack,) = [part for part in model.modules() if isinstance(part, mc.MaskedStack)]
    assert stack.masks.is_frozen
    assert accuracy > 0.9
    last = stack.masks.real[-1]
    assert last.max() > 2 * last.mean(), "the masks moved away from where they began, which is all alike"
