import copy

import pytest
import torch
from networks import chain_by_hand, option_a
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core.count import pruned_parameters
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
        model = mc.resnet(depth, 1000, fan_in=7, stem="imagenet")
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
        ({"aggregation": "max"}, "aggregation is 'max'; it must be one of mean, residual, stream, sum, scaled"),
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


def reading_one(model, wiring, x):
    """The network in which each block reads one other block, written by hand."""
    outputs = []
    x = model.stem(x)
    for block, row in zip(model.stack.blocks, wiring, strict=True):
        read = option_a(outputs[row[0]], outputs[-1].shape) if row else x
        outputs.append(F.relu(block.residual(read) + block.shortcut(read)))
    return model.classifier(outputs[-1].mean((2, 3)))


def test_with_one_source_each_a_block_reads_just_that_source():
    """Outputs, gradients and running statistics are bitwise identical."""
    wiring = [[], [0], [0], [2], [1], [3], [5], [2], [7]]
    model = mc.resnet(20, 10, connectivity=wiring, aggregation="residual")
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 16, 16)
    found, expected = model(x), reading_one(twin, wiring, x)
    assert torch.equal(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    alive = [p for p, q in zip(model.parameters(), twin.parameters(), strict=True) if q.grad is not None]
    assert len(alive) > 20
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert q.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert (
            "running" not in name or torch.equal(p, q[1]) or not model.stack.masks.current_wiring().alive[_block(name)]
        ), name


def _block(name):
    return int(name.split(".")[2]) if name.startswith("stack.blocks") else -1


def test_the_last_norm_of_a_block_starts_at_one_over_the_mean_fan_in_of_those_that_may_read_it():
    model = mc.resnet(14, 10, fan_in=2, aggregation="residual")
    starts = [block.residual[-1].weight for block in model.stack.blocks]
    for weight, wanted in zip(starts, [5 / 9, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1], strict=True):  # K is 1, 2, 2, 2, 2
        torch.testing.assert_close(weight, torch.full_like(weight, wanted))
    full = mc.resnet(14, 10, connectivity="full", aggregation="residual")  # K is 1, 2, 3, 4, 5
    wanted = [1 / 3, 1 / 3.5, 1 / 4, 1 / 4.5, 1 / 5, 1.0]
    torch.testing.assert_close([float(b.residual[-1].weight.detach()[0]) for b in full.stack.blocks], wanted)
    chain = mc.resnet(14, 10, connectivity="prev", aggregation="residual")
    assert all((block.residual[-1].weight == 1).all() for block in chain.stack.blocks)


@pytest.mark.parametrize(("depth", "stem", "size"), [(14, "cifar", 16), (18, "imagenet", 64), (50, "imagenet", 64)])
def test_a_stream_that_reads_everything_is_a_plain_network_with_activations_first(depth, stem, size):
    model = mc.resnet(depth, 10, connectivity="full", aggregation="stream", stem=stem).double()
    images = torch.randn(4, 3, size, size, dtype=torch.float64)
    x = model.stem(images)
    for block in model.stack.blocks:
        kinds = [type(layer) for layer in block]
        assert kinds == [nn.BatchNorm2d, nn.ReLU, nn.Conv2d] * (len(kinds) // 3)
        y = block(x.clone())
        x = option_a(x, y.shape) + y
    norm = model.last[0]
    features = F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)).mean((2, 3))
    torch.testing.assert_close(model(images), model.classifier(features))


@pytest.mark.parametrize("aggregation", ["mean", "residual", "stream"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_pruned_network_computes_the_same_whatever_the_join(aggregation, merge):
    torch.manual_seed(0)
    model = mc.resnet(20, 10, 2, connectivity="random", aggregation=aggregation, seed=3)
    x = torch.randn(4, 3, 16, 16)
    for _ in range(3):
        model(x)
    slim = mc.prune(model.eval(), x, merge=merge)
    torch.testing.assert_close(slim(x), model(x), rtol=0, atol=1e-5)
    alive = model.stack.masks.current_wiring().alive
    assert all(alive) == (aggregation == "stream")
    assert mc.count_parameters(slim).weights == pruned_parameters(model).transitive


def test_a_pruned_residual_network_reads_like_the_rule():
    model = mc.resnet(14, 10, connectivity=[[], [0], [0, 1], [1, 2], [1, 2], [3]], aggregation="residual").eval()
    code = mc.prune(model, torch.randn(1, 3, 16, 16), merge=False).code
    assert code.count("relu(") == 5  # of the blocks that can reach the output: 0, 1, 2, 3, 5
    assert "alpha = 0.5" in code
