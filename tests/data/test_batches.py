import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.data import Arrays, Augmentation, Batches, Files, in_memory, load, mean_of
from maskconnect.data.augment import GEOMETRY, LIGHTING, NUMBERS
from maskconnect.data.batches import Pictures
from maskconnect.data.decode import decode, resize
from maskconnect.data.geometry import Box, area_box, center_box, cut, shorter_box
from maskconnect.data.randomness import uniform

Image = pytest.importorskip("PIL.Image")

PLAN = Augmentation(size=8, pad=1, flip=True)


@pytest.fixture(scope="module")
def digits():
    return load("digits").train


def batches(images, plan=PLAN, **options):
    mean = mean_of(images, plan) if isinstance(images, Arrays) or plan.mean != "pixel" else torch.zeros(3, 1, 1)
    return Batches(images=images, plan=plan, mean=mean, **{"size": 64, "training": True, **options})


def test_an_epoch_shows_every_image_once_and_each_epoch_in_another_order(digits):
    found = batches(digits)
    labels = [torch.cat([y for _, y in found.epoch(e)]) for e in (0, 1)]
    assert len(found) == len(list(found.epoch(0))) == -(-len(digits) // 64)
    assert labels[0].sort().values.equal(digits.labels.sort().values)
    assert not labels[0].equal(labels[1])


def test_an_image_is_augmented_otherwise_in_every_epoch(digits):
    one = digits.subset(torch.tensor([0]))
    plan = Augmentation(size=8, pad=4, mean=(0.0,))
    shown = {str(next(batches(one, plan).epoch(epoch))[0].tolist()) for epoch in range(12)}
    assert len(shown) > 6


def test_a_resumed_epoch_continues_as_it_would_have(digits):
    whole = list(batches(digits, seed=3).epoch(2))
    rest = list(batches(digits, seed=3).epoch(2, first=5))
    assert len(rest) == len(whole) - 5
    for (x, y), (a, b) in zip(rest, whole[5:], strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_batches_of_one(digits, ranks):
    whole = list(batches(digits).epoch(1))
    parts = [list(batches(digits, rank=r, ranks=ranks).epoch(1)) for r in range(ranks)]
    for k, (x, y) in enumerate(whole):
        for rank, part in enumerate(parts):
            assert torch.equal(part[k][0], x[rank::ranks])
            assert torch.equal(part[k][1], y[rank::ranks])
        assert batches(digits).images_of(k) == len(y)


def test_a_test_pass_is_in_order_and_the_same_whatever_the_epoch_and_seed(digits):
    found = [list(batches(digits, training=False, seed=s).epoch(e)) for s, e in ((0, 0), (1, 5))]
    for (x, y), (a, b) in zip(*found, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert torch.cat([y for _, y in found[0]]).equal(digits.labels)


def test_a_batch_holds_crops_from_everywhere(digits):
    """The order of images and what happens to them have nothing to do with each other."""
    plan = Augmentation(size=8, pad=4, mean=(0.0,))
    for x, _ in list(batches(digits, plan, size=128).epoch(0))[:-1]:
        empty_rows = (x[:, 0].amax(2) == 0).float().mean(0)  # the padding moves a picture up or down by up to four rows
        assert empty_rows[0] > 0.2
        assert empty_rows[-1] > 0.2


def test_a_rank_may_get_nothing_of_a_test_set_but_not_of_a_training_set(digits, files):
    few = digits.subset(torch.arange(9))
    with pytest.raises(mc.ConfigError, match="the last batch of an epoch has 1 images for 2 ranks"):
        batches(few, size=4, ranks=2)
    sizes = [[len(y) for _, y in batches(few, size=4, rank=r, ranks=2, training=False).epoch(0)] for r in (0, 1)]
    assert sizes == [[2, 2, 1], [2, 2, 0]]
    plan = Augmentation(size=16, mean=(0.5, 0.5, 0.5), test_shorter=20)
    parts = list(batches(files.subset(torch.arange(5)), plan, size=4, rank=1, ranks=2, training=False).epoch(0))
    assert [tuple(x.shape) for x, _ in parts] == [(2, 3, 16, 16), (0, 3, 16, 16)]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"ranks": 0}, "rank is 0 of 0"), ({"rank": 2, "ranks": 2}, "rank is 2 of 2"), ({"size": 0}, "is 0")],
)
def test_ranks_that_cannot_be_are_an_error(digits, options, said):
    with pytest.raises(mc.ConfigError, match=said):
        batches(digits, **options)
    with pytest.raises(mc.ConfigError, match="first is -1"):
        next(batches(digits).epoch(0, first=-1))


def test_ways_to_cut_files_are_not_for_images_in_memory(digits):
    with pytest.raises(mc.ConfigError, match="area or shorter is set, but images are in memory"):
        batches(digits, Augmentation(size=8, area=(0.5, 1)))


def test_decoding_leaves_the_random_numbers_of_the_network_alone(files):
    before = torch.get_rng_state()
    list(batches(files, PICTURES, size=4).epoch(0))
    in_memory(files.subset(torch.tensor([0])))
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_costs_little_beside_a_training_step():
    images = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8)
    train = Arrays(images, torch.arange(128) % 10, tuple("0123456789"))
    model, found = (
        mc.resnet(38, 10, connectivity="prev"),
        batches(train, Augmentation(size=32, pad=4, flip=True), size=128),
    )
    augmenting, training = [], []
    for epoch in range(3):
        start = time.perf_counter()
        ((x, y),) = found.epoch(epoch)
        augmenting.append(time.perf_counter() - start)
        F.cross_entropy(model(x), y).backward()
        training.append(time.perf_counter() - start - augmenting[-1])
    assert min(augmenting) < 0.05 * min(training)


def test_a_batch_that_ranks_cannot_share_is_an_error(digits):
    with pytest.raises(mc.ConfigError, match="the batch size is 64; it must be a multiple of the number of ranks, 3"):
        batches(digits, ranks=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve pictures of different sizes."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    names = []
    for k in range(12):
        picture = rng.integers(0, 256, (30 + k, 40 + 3 * k, 3), dtype=np.uint8)
        Image.fromarray(picture).save(root / f"{k}.png")
        names.append(f"{k}.png")
    return Files(root, tuple(names), torch.arange(12) % 3, ("a", "b", "c"))


PICTURES = Augmentation(size=16, flip=True, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), area=(0.08, 1), jitter=0.4)


def test_pictures_are_the_same_whatever_the_number_of_workers(files):
    alone = list(batches(files, PICTURES, size=4).epoch(3))
    helped = list(batches(files, PICTURES, size=4, workers=2).epoch(3))
    rest = list(batches(files, PICTURES, size=4).epoch(3, first=1))
    assert [tuple(x.shape) for x, _ in alone] == [(4, 3, 16, 16)] * 3
    for (x, y), (a, b) in zip(alone, helped, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert torch.equal(rest[0][0], alone[1][0])
    assert not torch.equal(alone[0][0], next(iter(batches(files, PICTURES, size=4).epoch(4)))[0])


def test_where_a_picture_is_cut_follows_from_numbers_of_its_own(files):
    """Neither from those that decide the order, nor from those that flip it and change its colors."""
    image, _ = Pictures(files, plan=PICTURES, seed=2, epoch=5)[7]
    numbers = uniform(2, 5, np.array([7]), NUMBERS)[0]
    wanted = cut(decode(files.root / files.names[7]), PICTURES, numbers[GEOMETRY:])
    assert torch.equal(image, torch.from_numpy(wanted).permute(2, 0, 1))
    assert GEOMETRY >= LIGHTING + 4
    assert GEOMETRY + 40 <= NUMBERS


def test_a_picture_that_cannot_be_read_is_named(files, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    broken = Files(tmp_path, ("bad.png",), torch.tensor([0]), ("a",))
    said = []
    for workers in (0, 1):
        with pytest.raises(mc.DataError, match=r"bad\.png") as error:
            list(batches(broken, PICTURES, workers=workers).epoch(0))
        said.append(str(error.value))
    assert said[0] == said[1]
    assert said[0].startswith(str(tmp_path))


def test_pictures_that_are_not_cut_to_one_size_are_an_error(files):
    plan = Augmentation(size=16, mean=(0.5, 0.5, 0.5))
    for training, needed in ((True, "area or augmentation.shorter"), (False, "test_shorter")):
        with pytest.raises(
            mc.ConfigError, match=rf"the recipe must say how to crop them\. Set augmentation.{needed}, or"
        ):
            batches(files, plan, training=training)


def test_pictures_of_one_size_go_into_memory(tmp_path, files):
    for k in range(3):
        Image.fromarray(np.full((6, 5, 3), 10 * k, dtype=np.uint8)).save(tmp_path / f"{k}.png")
    small = Files(tmp_path, ("0.png", "1.png", "2.png"), torch.tensor([0, 1, 0]), ("a", "b"))
    for workers in (0, 2):
        assert in_memory(small, workers=workers).images[:, 0, 0, 0].tolist() == [0, 10, 20]
    with pytest.raises(
        mc.DataError, match=r"1\.png is 31x43, 0\.png is 30x40; images in memory must have the same size"
    ):
        in_memory(files)
    with pytest.raises(mc.ConfigError, match="mean is 'pixel', which needs images in memory"):
        mean_of(files, PLAN)


def numbers(count):
    return np.random.default_rng(count).random((400, 53))


def test_an_area_crop_lies_inside_and_has_the_area_and_shape_that_it_should():
    boxes = [area_box(300, 400, (0.08, 1.0), row) for row in numbers(1)]
    for box in boxes:
        assert 0 <= box.top <= 300 - box.height
        assert 0 <= box.left <= 400 - box.width
        assert 0.079 < box.height * box.width / 120_000 <= 1
        assert 0.74 < box.width / box.height < 1.35
    shares = sorted(box.height * box.width / 120_000 for box in boxes)
    assert shares[40] < 0.25
    assert shares[-40] > 0.65


def test_an_area_crop_of_a_very_long_picture_falls_back_to_the_center():
    box = area_box(10, 1000, (0.08, 1.0), np.full(53, 0.9))
    assert (box.height, box.width, box.left) == (10, 10, 495)


def test_a_crop_by_the_shorter_side_is_a_square_of_the_scaled_size():
    boxes = [shorter_box(300, 400, 224, (256, 480), row) for row in numbers(2)]
    sides = [box.height for box in boxes]
    assert 300 * 224 / 480 <= min(sides) < 300 * 224 / 470
    assert 300 * 224 / 266 < max(sides) <= 300 * 224 / 256
    assert all(box.height == box.width and box.top + box.height <= 300 and box.left + box.width <= 400 for box in boxes)
    assert len(set(sides)) > 50


def test_the_test_crop_is_the_center():
    assert center_box(256, 320, 224 / 256) == Box(16, 48, 224, 224)
    assert center_box(512, 640, 224 / 256) == Box(32, 96, 448, 448)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (512, 640), (1280, 1024)])
def test_the_test_crop_is_that_of_scaling_the_whole_picture_first(height, width):
    down, across = np.mgrid[:height, :width]
    waves = [127 + 120 * np.sin(down / 9 + k) * np.cos(across / 7) for k in range(3)]
    smooth = np.stack(waves, axis=2).astype(np.uint8)
    found = cut(smooth, Augmentation(size=224, test_shorter=256), None).astype(int)
    scale = 256 / min(height, width)
    whole = resize(smooth, round(height * scale), round(width * scale))
    top, left = (whole.shape[0] - 224) // 2, (whole.shape[1] - 224) // 2
    assert abs(found - whole[top : top + 224, left : left + 224].astype(int)).max() <= 1


def test_a_cut_is_resized_to_the_square():
    picture = np.zeros((50, 70, 3), dtype=np.uint8)
    picture[:, 35:] = 200
    area = Augmentation(size=24, area=(0.5, 1), test_shorter=28)
    shorter = Augmentation(size=24, shorter=(28, 40))
    for plan, row in ((area, np.full(53, 0.5)), (shorter, np.full(53, 0.5)), (area, None)):
        part = cut(picture, plan, row)
        assert part.shape == (24, 24, 3)
        assert part.dtype == np.uint8
        assert {0, 200} <= set(part[0, [0, -1], 0].tolist())


def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_wait_for_its_workers(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(4):
        image.new("RGB", (20, 20)).save(tmp_path / f"{number}.png")
    code = f"""
import builtins, torch
from pathlib import Path
from maskconnect.data import Augmentation, Batches
from maskconnect.data.sets import Files
files = Files(Path({str(tmp_path)!r}), tuple(f"{{n}}.png" for n in range(4)), torch.zeros(4, dtype=torch.int64), ("a",))
plan = Augmentation(size=8, mean=(0.5, 0.5, 0.5), area=(0.5, 1.0))
batches = Batches(images=files, plan=plan, size=1, mean=torch.zeros(3, 1, 1), training=True, workers=1)
builtins.kept = batches.epoch(0)  # until the very end
next(builtins.kept)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
