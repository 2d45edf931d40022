"""A picture in a file becomes what a test image of the set was."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from maskconnect.data.augment import Augmentation, pixel_mean, prepare
from maskconnect.data.batches import Batches
from maskconnect.data.catalog import ABOUT, SIDES
from maskconnect.data.sets import Arrays, Files
from maskconnect.data.small import read_digits
from maskconnect.errors import CheckpointError, ConfigError, DataError
from maskconnect.recipes import load, names
from maskconnect.ship.preprocessing import Preprocessing, from_description, of_recipe
from maskconnect.training.images import _shrunk


def noise(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def written(folder, images_NCHW):
    """The paths of PNG files of some images."""
    paths = []
    for number, image_CHW in enumerate(images_NCHW):
        pixels = image_CHW.permute(1, 2, 0).numpy()
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(paths[-1])
    return paths


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_the_sets_own_size_is_taken_as_it_is(channels, tmp_path):
    images, mean = noise(5, channels, 12, 12), torch.rand(channels, 12, 12)
    std = (0.2, 0.3, 0.4)[:channels]
    found = Preprocessing(channels=channels, raw=(12, 12), size=8, mean=mean, std=std)
    expected = prepare(images, Augmentation(size=8, std=std), mean, None)
    same(found.read_pictures(written(tmp_path, images)), expected)


def test_pictures_are_shrunk_as_those_of_the_set_are(tmp_path):
    images = noise(5, 3, 32, 32)
    small = _shrunk(Arrays(images, torch.zeros(5, dtype=torch.int64), ("a",)), 2)
    mean = pixel_mean(small.images)
    (expected, _), *_ = Batches(images=small, plan=Augmentation(size=16), size=5, mean=mean, training=False).epoch(0)
    found = Preprocessing(channels=3, raw=(32, 32), shrink=2, size=16, mean=mean)
    same(found.read_pictures(written(tmp_path, images)), expected)


def test_pictures_for_a_set_in_files_are_cut_as_that_set_is(tmp_path):
    paths = written(tmp_path, [noise(3, 40, 50), noise(3, 70, 33), noise(3, 9, 9), noise(1, 24, 24)])
    files = Files(tmp_path, tuple(path.name for path in paths), torch.zeros(4, dtype=torch.int64), ("a",))
    plan = Augmentation(size=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), test_shorter=20)
    mean = torch.tensor(plan.mean)[:, None, None]
    (expected, _), *_ = Batches(images=files, plan=plan, size=4, mean=mean, training=False).epoch(0)
    found = Preprocessing(channels=3, test_shorter=20, size=16, mean=mean, std=plan.std)
    same(found.read_pictures(paths), expected)


@pytest.mark.parametrize(("height", "width"), [(32, 80), (80, 32), (32, 32)])
def test_a_larger_picture_is_scaled_and_its_center_taken(height, width, tmp_path):
    image = noise(3, height, width)
    (path,) = written(tmp_path, [image])
    with Image.open(path) as picture:
        scaled = np.array(picture.resize((width // 4, height // 4), Image.Resampling.BILINEAR))
    top, left = (height // 4 - 8) // 2, (width // 4 - 8) // 2
    expected = torch.from_numpy(scaled[top : top + 8, left : left + 8]).permute(2, 0, 1)
    found = Preprocessing(channels=3, raw=(8, 8), size=8, mean=torch.zeros(3, 1, 1))
    same(found.pixels(path), expected)


def test_images_of_a_set_may_be_higher_than_wide(tmp_path):
    image = noise(3, 12, 9)
    own, double = written(tmp_path, [image, image.repeat_interleave(2, 1).repeat_interleave(2, 2)])
    found = Preprocessing(channels=3, raw=(12, 9), size=8, mean=torch.rand(3, 12, 9))
    same(found.pixels(own), image)
    assert found.pixels(double).shape == (3, 12, 9)
    assert found.read_pictures([own, double]).shape == (2, 3, 8, 8)


def test_a_picture_that_is_smaller_than_the_sets_is_enlarged(tmp_path):
    paths = written(tmp_path, [torch.full((3, 1, 100), 77, dtype=torch.uint8)])
    found = Preprocessing(channels=3, raw=(8, 8), size=8, mean=torch.zeros(3, 1, 1))
    same(found.pixels(paths[0]), torch.full((3, 8, 8), 77, dtype=torch.uint8))


def test_colors_become_the_gray_that_eyes_see(tmp_path):
    image = noise(3, 8, 8)
    (path,) = written(tmp_path, [image])
    found = Preprocessing(channels=1, raw=(8, 8), size=8, mean=torch.zeros(1, 1, 1)).pixels(path)
    expected = (image * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.51)


def test_no_pictures_are_an_empty_batch():
    found = Preprocessing(channels=1, raw=(8, 8), size=6, mean=torch.zeros(1, 8, 8)).read_pictures([])
    assert found.shape == (0, 1, 6, 6)


def test_what_is_not_a_picture_is_an_error_that_does_not_mention_a_set(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    found = Preprocessing(channels=1, raw=(8, 8), size=8, mean=torch.zeros(1, 1, 1))
    with pytest.raises(DataError, match=r"a\.png is not a readable JPEG or PNG.*; pass a JPEG or PNG file\.$"):
        found.read_pictures([tmp_path / "a.png"])


FILES = Preprocessing(channels=3, test_shorter=20, size=16, mean=torch.rand(3, 1, 1), std=(0.1, 0.2, 1 / 3))
MEMORY = Preprocessing(channels=1, raw=(8, 12), shrink=2, size=4, mean=torch.rand(1, 4, 6))


@pytest.mark.parametrize("before", [FILES, MEMORY])
def test_a_description_in_json_is_read_back_as_what_it_was(before, tmp_path):
    after = from_description(json.loads(json.dumps(before.describe())), before.mean)
    assert after.describe() == before.describe()
    paths = written(tmp_path, [noise(3, 30, 41)])
    same(after.read_pictures(paths), before.read_pictures(paths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sise": 4}, "sise is unknown"),
        ({"size": "4"}, "size is '4'; it must be an integer"),
        ({"size": True}, "size is True; it must be an integer"),
        ({"size": None}, "size is None"),
        ({"size": 0}, "size is 0"),
        ({"size": 5}, "size is 5; it must be at most the sides of the images, 4x6"),
        ({"channels": 2}, "channels is 2"),
        ({"channels": 3}, "mean is 1x4x6; it must be 3x1x1 or 3x4x6"),
        ({"raw": 8}, "raw is 8; it must be a list of numbers"),
        ({"raw": [8.0, 12]}, "raw is .8.0, 12.; it must be a list"),
        ({"raw": [8]}, "it must be height and width"),
        ({"raw": [9, 12]}, "both multiples of 2"),
        ({"raw": None}, "one of raw and test_shorter"),
        ({"test_shorter": 20}, "one of raw and test_shorter"),
        ({"shrink": 0}, "shrink is 0"),
        ({"std": [1.0, 2.0]}, "std is"),
        ({"std": [0]}, "std is"),
        ({"std": ["1"]}, "std is"),
    ],
)
def test_a_description_that_cannot_be_is_one_sentence(change, message):
    with pytest.raises(CheckpointError, match=f"^here: .*{message}") as caught:
        from_description(MEMORY.describe() | change, MEMORY.mean, where="here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["channels", "raw", "test_shorter", "shrink", "size", "std"])
def test_nothing_may_be_missing_from_a_description(name):
    described = MEMORY.describe()
    del described[name]
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        from_description(described, MEMORY.mean)


def test_a_description_that_is_not_a_table_is_an_error():
    with pytest.raises(CheckpointError, match="is not a table"):
        from_description([1], MEMORY.mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_shorter": 15}, "test_shorter is 15"),
        ({"shrink": 2}, "for a set in files they must be 3 and 1"),
        ({"channels": 1, "mean": torch.zeros(1, 1, 1), "std": None}, "for a set in files they must be 3 and 1"),
        ({"mean": torch.zeros(3, 1, 1, dtype=torch.float64)}, "mean is torch.float64"),
        ({"mean": torch.full((3, 1, 1), float("nan"))}, "finite"),
    ],
)
def test_a_preprocessing_that_cannot_be_is_an_error(change, message):
    with pytest.raises(ConfigError, match=message):
        Preprocessing(**{**FILES.describe(), "mean": FILES.mean} | change)


def test_the_sides_of_sets_in_memory_are_what_the_catalog_says():
    digits = read_digits()
    assert digits.test.images.shape[2:] == (SIDES["digits"], SIDES["digits"])
    assert {name for name, about in ABOUT.items() if "x" in about and name != "mini-imagenet"} >= set(SIDES)
    for name, side in SIDES.items():
        assert f"of {side}x{side}" in ABOUT[name]


def test_the_preprocessing_of_every_recipe_is_known():
    found = {}
    for name in names():
        recipe = load(name)
        plan, side = recipe.augmentation, {"mini-imagenet": 84, **SIDES}.get(recipe.data.name, 0)
        channels = 1 if recipe.data.name in ("digits", "mnist5k", "fashion-mnist") else 3
        mean = torch.rand(channels, *[side // recipe.data.shrink] * 2)
        if plan.mean != "pixel":
            mean = torch.tensor(plan.mean)[:, None, None]
        preprocessing = of_recipe(recipe, mean)
        assert preprocessing.raw == ((side, side) if side else None)
        assert (preprocessing.size, preprocessing.std, preprocessing.mean is mean) == (plan.size, plan.std, True)
        found[recipe.data.name] = preprocessing.test_shorter
    small = ("cifar10", "cifar100", "digits", "mnist5k", "fashion-mnist", "mini-imagenet")
    assert found == {**dict.fromkeys(small), "imagenet": 256}


def test_the_side_of_a_set_in_memory_is_known_where_its_mean_is_a_number_a_channel():
    recipe = load("quick/cifar10", ["augmentation.mean=[0.4, 0.5, 0.6]"])
    assert of_recipe(recipe, torch.tensor([0.4, 0.5, 0.6])[:, None, None]).raw == (32, 32)


def test_files_whose_mean_is_of_each_pixel_are_of_the_size_of_that_mean():
    recipe = load("paper/mini-resnext20-4-8-full")
    assert of_recipe(recipe, torch.rand(3, 70, 84)).raw == (70, 84)
