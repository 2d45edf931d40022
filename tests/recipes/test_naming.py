"""What people call networks, wirings and data."""

import pytest

from maskconnect.recipes import load, names
from maskconnect.recipes.naming import data_name


@pytest.mark.parametrize(
    ("recipe", "settings", "name"),
    [
        ("quick/cifar100", [], "CIFAR-100 (20 coarse classes, 8x8)"),
        ("quick/cifar100-resnext-full", [], "CIFAR-100 (20 coarse classes, 8x8)"),
        ("quick/cifar100", ["data.labels=fine"], "CIFAR-100 (8x8)"),
        ("quick/cifar10", [], "CIFAR-10 (8x8)"),
        ("quick/digits", [], "digits"),
        ("paper/cifar100-resnet38-learned", [], "CIFAR-100"),
        ("paper/cifar100-resnet38-learned", ["data.labels=coarse"], "CIFAR-100 (20 coarse classes)"),
        ("paper/mini-resnext20-4-8-full", [], "Mini-ImageNet"),
        ("paper/imagenet-resnet50-learned", [], "ImageNet"),
    ],
)
def test_data_are_named_with_what_makes_them_another_task(recipe, settings, name):
    assert data_name(load(recipe, settings)) == name


def test_what_a_recipe_says_about_itself_begins_with_its_data():
    for recipe in map(load, names()):
        assert recipe.about.lower().startswith(f"{data_name(recipe).lower()}, "), recipe.name
