"""The `strong` recipes are the paper's except for what research/evidence.md found to be better."""

from dataclasses import replace

import pytest

import maskconnect as mc
from maskconnect.recipes import load, names
from maskconnect.recipes.schema import LearningTable

STRONG = [name for name in names() if name.startswith("strong/")]


def literal(recipe, mask_lr):
    """The same with masks that learn as in the paper."""
    learn, *others = recipe.phase
    phases, model = (replace(learn, mask_lr=mask_lr), *others), replace(recipe.model, use_all=False)
    return replace(recipe, name="", about="", paper=None, phase=phases, model=model, learning=LearningTable())


@pytest.mark.parametrize("name", STRONG)
def test_only_how_masks_learn_is_another(name):
    strong = load(name)
    paper = load(name.replace("strong/", "paper/") + "-learned")
    assert literal(strong, strong.phase[0].mask_lr) == replace(paper, name="", about="", paper=None)
    assert strong.learning.how(9) == mc.Blend(steps=9, gradient="plain", credit="new", uniform_floor=0.0)
    assert strong.model.use_all
    assert strong.paper is None


@pytest.mark.parametrize("name", ["quick/cifar10", "quick/cifar100"])
def test_the_quick_ones_also_have_a_rate_for_few_steps(name):
    assert literal(load(f"{name}-strong"), 0.3) == literal(load(name), 0.3)
    assert load(f"{name}-strong").phase[0].mask_lr == 3.0
