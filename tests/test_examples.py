"""The same code learns the wiring of an MLP, of a transformer encoder and of a conv net."""

import ast
import importlib.util
import re
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


RESULT = re.compile(r"^(\w[\w ]*?) +wiring(?:, 6 blocks)?: \D*(\d+\.\d+)", re.MULTILINE)
"""A line of an example's output: the wiring and its result."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_its_header_says_how_to_run_it_and_what_it_printed(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 70
    what, blank, run, result, end = text.splitlines()[:5]
    assert (what[:3], blank, end) == ('"""', "", '"""')
    assert re.fullmatch(rf"Run it with: (python|torchrun .*) examples/{path.name} \(\d+ seconds on .+\)", run)
    assert re.fullmatch(r"Result here, (mean of 3 seeds|one seed): .*learned .*\d.*\.", result)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_only_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("maskconnect") or node.module == "maskconnect.data"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mc":
            assert node.attr in mc.__all__


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_fixed_wiring_beside_learned(path):
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    results = dict(RESULT.findall(run.stdout))
    assert "learned" in results
    assert results.keys() & {"prev", "random", "evenly spaced"}
    assert run.stderr == ""


def test_the_comparison_is_found_in_what_examples_print():
    printed = "before, 12 blocks: 1.0 %\nlearned  wiring: squared error 0.16\nevenly spaced wiring, 6 blocks: 8.5 %\n"
    assert RESULT.findall(printed) == [("learned", "0.16"), ("evenly spaced", "8.5")]


@pytest.mark.parametrize("how", [{}, {"how": mc.Draw(), "mask_lr": 0.1}], ids=["blended", "as in the paper"])
@pytest.mark.parametrize("seed", range(5))
def test_learning_finds_exactly_the_two_of_eight_sources_that_carry_signal(seed, how):
    example = load("mlp")
    model, accuracy = example.train(seed=seed, **how)
    assert mc.wiring_of(model)[1] == [list(example.SIGNAL)]
    assert accuracy > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_without_the_mask_update_it_does_not_find_them(seed):
    example = load("mlp")
    model, accuracy = example.train(seed=seed, mask_lr=0.0)
    assert mc.wiring_of(model)[1] != [list(example.SIGNAL)]
    assert accuracy < 0.6


def test_blending_finds_sources_that_matter_only_together_and_draws_do_not(monkeypatch):
    example = load("mlp")
    monkeypatch.setattr(example, "batch", partial(exclusive_or.batch, pair=example.SIGNAL))
    model, accuracy = example.train(how=mc.Blend(steps=1000), steps=1000)
    assert mc.wiring_of(model)[1] == [list(example.SIGNAL)]
    assert accuracy > 0.9
    assert example.train(how=mc.Draw(), mask_lr=0.1, steps=1000)[1] < 0.6


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_a_wiring_is_learned_frozen_and_useful(name):
    model, accuracy = load(name).train()
    (stack,) = [part for part in model.modules() if isinstance(part, mc.MaskedStack)]
    assert stack.masks.is_frozen
    assert accuracy > 0.9
    last = stack.masks.real[-1]
    assert last.max() > 2 * last.mean(), "the masks moved away from where they began, which is all alike"
