"""The images of a recipe."""

from dataclasses import replace

import pytest
import runs
import torch
from torch.nn import functional as F

from maskconnect.data.catalog import load
from maskconnect.errors import ConfigError, DataError
from maskconnect.training.images import prepare, read
from maskconnect.training.options import Options

CPU = torch.device("cpu")


def prepared(tmp_path, *settings, **fields):
    return prepare(runs.tiny(tmp_path, *settings, **fields), Options(), CPU)


def test_the_same_number_of_images_is_taken_of_every_class(tmp_path):
    found = prepared(tmp_path)
    assert len(found.train.images) == 160
    assert len(found.test.images) == 60
    assert set(found.train.images.labels.bincount().tolist()) <= {15, 16, 17}
    assert set(found.test.images.labels.bincount().tolist()) <= {5, 6, 7}


def test_all_runs_of_a_recipe_see_the_same_images_in_another_order(tmp_path):
    one, other = (prepared(tmp_path, seed=seed) for seed in (0, 1))
    assert torch.equal(one.train.images.images, other.train.images.images)
    assert not torch.equal(next(one.train.epoch(0))[1], next(other.train.epoch(0))[1])


def test_validation_images_are_no_training_images(tmp_path):
    recipe = runs.tiny(tmp_path, "data.validation=100")
    splits = read(replace(recipe.data, train_images=None), None)
    whole = load("digits").train
    assert len(splits.train) + len(splits.validation) == len(whole)
    assert len(prepare(recipe, Options(), CPU).validation.images) == 100


def test_images_are_shrunk_by_the_mean_of_squares(tmp_path):
    small = prepared(tmp_path, "data.shrink=2", "augmentation.size=4").test.images.images
    whole = prepared(tmp_path).test.images.images
    assert torch.equal(small, F.avg_pool2d(whole.float(), 2).round().byte())


def test_the_mean_is_that_of_the_images_that_are_trained_on(tmp_path):
    found = prepared(tmp_path)
    torch.testing.assert_close(found.mean, found.train.images.images.float().mean(0) / 255)


def test_almost_all_images_can_be_taken(tmp_path):
    assert len(prepared(tmp_path, "data.train_images=1430", "data.test_images=359").train.images) == 1430


def test_what_cannot_be_is_said(tmp_path):
    for setting, message in (
        ("data.train_images=5000", "data.train_images is 5000; the set has only 1437 images"),
        ("data.test_images=5000", "data.test_images is 5000; the set has only 360 images"),
        ("data.shrink=3", "data.shrink is 3; it must divide the height and width of the images, 8x8"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, setting)
    with pytest.raises(DataError, match="maskconnect data fetch cifar10"):
        prepare(runs.tiny(tmp_path, "data.name=cifar10"), Options(data=tmp_path), CPU)
