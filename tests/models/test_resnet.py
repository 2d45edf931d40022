import pytest
import torch
from networks import chain_by_hand
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.models import ResNetSpec, build


@pytest.mark.parametrize(("depth", "count"), [(38, 567_220), (74, 1_150_516), (110, 1_733_812)])
def test_parameters_are_as_many_as_in_the_paper(depth, count):
    blocks = (depth - 2) // 2
    model = mc.resnet(depth, 100, fan_in=10)
    assert mc.count_parameters(model) == (count, blocks * (blocks - 1) // 2)
    assert mc.count_parameters(mc.resnet(depth, 100, connectivity="prev")) == (count, 0)
    mc.freeze(model)
    assert mc.count_parameters(model).mask_entries == blocks * (blocks - 1) // 2


# The counts of torchvision's documentation for the plain networks.
@pytest.mark.parametrize(
    ("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)]
)
def test_imagenet_networks_have_the_published_size(depth, count):
    with torch.device("meta"):
        model = mc.resnet(depth, 1000, fan_in=10, stem="imagenet")
    assert mc.count_parameters(model).weights == count


@pytest.mark.parametrize("fan_in", range(1, 18))
def test_every_fan_in_runs_forward_and_backward_with_the_same_parameters(fan_in):
    model = mc.resnet(38, 100, fan_in=fan_in)
    F.cross_entropy(model(torch.randn(2, 3, 16, 16)), torch.arange(2)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert mc.count_parameters(model).weights == 567_220


@pytest.mark.parametrize("connectivity", ["random", "full"])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_a_block_reads_the_mean_or_the_sum_of_blocks_of_every_stage(connectivity, aggregation):
    model = mc.resnet(20, 10, 3, connectivity=connectivity, aggregation=aggregation).double()
    x = torch.randn(2, 3, 16, 16).double()
    by_hand = chain_by_hand(model.stack.blocks, mc.wiring_of(model), model.stem(x), mean=aggregation == "mean")
    torch.testing.assert_close(model(x), model.classifier(by_hand.mean((2, 3))))


@pytest.mark.parametrize(("stem", "size"), [("cifar", 33), ("mini", 67), ("imagenet", 65)])
def test_images_may_have_other_channels_and_odd_sizes(stem, size):
    model = mc.resnet(50, 7, fan_in=4, stem=stem, in_channels=1)
    assert model(torch.randn(2, 1, size, size + 6)).shape == (2, 7)


def test_a_stem_shrinks_the_image_as_the_paper_says():
    for stem, size, wanted in (("cifar", 32, (16, 32)), ("mini", 64, (16, 32)), ("imagenet", 224, (64, 56))):
        model = mc.resnet(50, 10, fan_in=1, stem=stem)
        assert model.stem(torch.randn(1, 3, size, size)).shape[1:3] == wanted


def test_stages_halve_the_resolution_and_double_the_width():
    model = mc.resnet(20, 10, connectivity="prev")
    x, shapes = model.stem(torch.randn(1, 3, 32, 32)), []
    for block in model.stack.blocks:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_a_spec_builds_the_same_network():
    spec = ResNetSpec(depth=20, num_classes=10, fan_in=3, seed=4)
    torch.manual_seed(0)
    model = build(spec)
    torch.manual_seed(0)
    again = mc.resnet(20, 10, 3, seed=4)
    x = torch.randn(2, 3, 16, 16)
    assert again.spec == spec
    assert torch.equal(model(x), again(x))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 40}, r"depth is 40; with stem='cifar' it must be 6n\+2, such as 38 or 44\."),
        ({"depth": 101}, r"98 or 104\. For an ImageNet network pass stem='imagenet'\."),
        ({"depth": 38, "stem": "imagenet"}, "one of 18, 34, 50, 101, 152"),
        ({"depth": "38"}, "depth is '38'; it must be an integer"),
        ({"aggregation": "max"}, "aggregation is 'max'; it must be one of mean, residual, sum, root, scaled"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"connectivity": "previous"}, "Did you mean 'prev'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_mistakes_are_one_sentence(options, said):
    with pytest.raises(mc.MaskConnectError, match=said) as error:
        mc.resnet(**{"depth": 20, "num_classes": 10, "fan_in": 2} | options)
    assert "\n" not in str(error.value)


def test_only_a_spec_can_be_built():
    with pytest.raises(mc.ConfigError, match="spec is a dict; it must be one of ResNetSpec, ResNeXtSpec"):
        build({"depth": 38})
