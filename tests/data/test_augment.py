from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.data.augment import NUMBERS, Augmentation, jittered, lit, pixel_mean, prepare
from maskconnect.data.randomness import uniform

IMAGES = torch.randint(0, 256, (40, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def numbers(count=40, epoch=0):
    return torch.from_numpy(uniform(0, epoch, np.arange(count), NUMBERS))


def test_the_mean_of_each_pixel_is_taken_over_the_set():
    torch.testing.assert_close(pixel_mean(IMAGES), (IMAGES.double() / 255).mean(0).float())


def test_a_test_image_is_the_plain_one_less_the_mean():
    mean = pixel_mean(IMAGES)
    found = prepare(IMAGES, Augmentation(size=12, pad=4, flip=True), mean, None)
    torch.testing.assert_close(found, IMAGES.float() / 255 - mean)


def test_a_test_image_that_is_larger_is_cut_in_the_center_with_its_mean():
    mean = pixel_mean(IMAGES)
    found = prepare(IMAGES, Augmentation(size=8), mean, None)
    torch.testing.assert_close(found, (IMAGES.float() / 255 - mean)[:, :, 2:10, 2:10])


def test_training_images_are_padded_with_zeros_cropped_anywhere_and_mirrored():
    mean, plan = pixel_mean(IMAGES), Augmentation(size=12, pad=2, flip=True)
    found = prepare(IMAGES, plan, mean, numbers())
    padded = F.pad(IMAGES.float() / 255 - mean, [2] * 4)
    seen = set()
    for image, wide in zip(found, padded, strict=True):
        places = []
        for top, left, flip in product(range(5), range(5), (False, True)):
            part = wide[:, top : top + 12, left : left + 12]
            if torch.equal(image, part.flip(2) if flip else part):
                places.append((top, left, flip))
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) > 20
    assert {flip for _, _, flip in seen} == {False, True}
    assert {top for top, _, _ in seen} == set(range(5)) == {left for _, left, _ in seen}


def test_without_flip_nothing_is_mirrored():
    mean = torch.zeros(3, 1, 1)
    assert torch.equal(prepare(IMAGES, Augmentation(size=12), mean, numbers()), IMAGES.float() / 255)


def test_an_image_is_augmented_alike_alone_and_in_a_batch():
    plan = Augmentation(
        size=8,
        pad=1,
        flip=True,
        jitter=0.4,
        lighting=0.1,
        components=((0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1)),
        std=(1, 2, 3),
    )
    mean = pixel_mean(IMAGES)
    batch = prepare(IMAGES, plan, mean, numbers())
    for k in (0, 7, 39):
        torch.testing.assert_close(prepare(IMAGES[k : k + 1], plan, mean, numbers()[k : k + 1])[0], batch[k])


def test_an_image_is_divided_by_the_standard_deviation_of_its_channel():
    plan = Augmentation(size=12, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    mean = torch.tensor(plan.mean)[:, None, None]
    found = prepare(IMAGES, plan, mean, None)
    torch.testing.assert_close(found[:, 1], (IMAGES[:, 1].float() / 255 - 0.4) / 0.2)


def test_jitter_changes_brightness_contrast_and_saturation_each_by_its_own_number():
    x = IMAGES[:1].float() / 255
    assert torch.allclose(jittered(x, 0.4, torch.tensor([[0.5, 0.5, 0.5]])), x)
    brighter = jittered(x, 0.4, torch.tensor([[1.0, 0.5, 0.5]]))
    torch.testing.assert_close(brighter, 1.4 * x)
    gray = (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    contrast = jittered(x, 0.4, torch.tensor([[0.5, 0.0, 0.5]]))
    torch.testing.assert_close(contrast, 0.6 * x + 0.4 * gray.mean())
    saturation = jittered(x, 0.4, torch.tensor([[0.5, 0.5, 0.0]]))
    torch.testing.assert_close(saturation, 0.6 * x + 0.4 * gray)


def test_lighting_adds_one_color_to_an_image_with_the_given_spread():
    components = ((0.3, 0.1, 0.0), (0.0, 0.2, 0.1), (0.1, 0.0, 0.1))
    plan = Augmentation(size=12, lighting=0.1, components=components)
    x = torch.zeros(20000, 3, 1, 1)
    numbers_N4 = torch.from_numpy(uniform(1, 0, np.arange(20000), 4))
    added = lit(x, plan, numbers_N4)[:, :, 0, 0].double()
    wanted = 0.01 * torch.tensor(components).double().T @ torch.tensor(components).double()
    torch.testing.assert_close(added.T.cov(), wanted, rtol=0.1, atol=2e-5)
    assert added.mean(0).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": 4, "pad": -1}, "pad is -1"),
        ({"size": 4, "mean": "image"}, "mean is 'image'; it must be 'pixel', or one number per channel"),
        ({"size": 4, "area": (0.5, 0.1)}, "it must be two shares above 0 and at most 1, the smaller first"),
        ({"size": 4, "shorter": (3, 9)}, "it must be two lengths of at least 4 \\(the size\\), the smaller first"),
        ({"size": 4, "shorter": (4, 9), "area": (0.1, 1)}, "area and shorter are both set"),
        ({"size": 4, "test_shorter": 3}, "test_shorter is 3; it must be at least the size, 4"),
        ({"size": 4, "std": (0.0, 1.0)}, "std is .*one number above 0 per channel"),
        ({"size": 4, "mean": (0.1,), "std": (1.0, 1.0)}, "mean has 1 numbers and std has 2"),
        ({"size": 4, "lighting": 0.1, "components": ((1,), (1,), (1,))}, "three numbers each"),
        ({"size": 4, "jitter": 1.5}, r"jitter is 1\.5"),
        (
            {"size": 4, "lighting": 0.1},
            "lighting is set without components; set components to the three principal components",
        ),
    ],
)
def test_a_plan_that_cannot_be_meant_is_an_error(plan, said):
    with pytest.raises(mc.ConfigError, match=said):
        Augmentation(**plan)


def test_a_plan_for_another_number_of_channels_is_an_error():
    gray, nothing = IMAGES[:, :1], torch.zeros(1, 1, 1)
    rgb = ((0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1))
    with pytest.raises(mc.ConfigError, match="lighting is set for images with 1 channels; it needs 3"):
        prepare(gray, Augmentation(size=12, lighting=0.1, components=rgb), nothing, numbers())
    with pytest.raises(mc.ConfigError, match="images have 3 channels and mean has 1"):
        prepare(IMAGES, Augmentation(size=12), nothing, None)
    with pytest.raises(
        mc.ConfigError, match="images have 1 channels and mean has 1; mean and std need one number per channel"
    ):
        prepare(gray, Augmentation(size=12, std=(1, 2)), nothing, None)


def test_a_crop_larger_than_the_image_is_an_error():
    with pytest.raises(mc.DataError, match="images are 12x12, smaller than the crop of 16x16"):
        prepare(IMAGES, Augmentation(size=16), torch.zeros(3, 1, 1), numbers())
