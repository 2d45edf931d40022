"""Activations grow no more than in the plain network (D1, D2), and do not vanish."""

import warnings

import pytest
import torch
from plain import PlainResNet, PlainResNeXt

import maskconnect as mc
from maskconnect.core.checks import GrowthWatch

RESNETS = [  # stem, depth, blocks of a stage, fan-ins, image size
    ("cifar", 38, [6, 6, 6], range(1, 18), 16),
    ("cifar", 74, [12, 12, 12], [1, 15, 35], 16),
    ("cifar", 110, [18, 18, 18], [1, 20, 53], 16),
    ("imagenet", 50, [3, 4, 6, 3], [1, 10, 15], 64),
]
RESNEXTS = [  # stem, (depth, width, cardinality), modules of a stage, fan-ins, image size
    ("cifar", (20, 4, 8), [2, 2, 2], range(1, 9), 16),
    ("cifar", (29, 4, 8), [3, 3, 3], [1, 4, 8], 16),
    ("cifar", (29, 8, 8), [3, 3, 3], [1, 4, 8], 16),
    ("cifar", (29, 64, 8), [3, 3, 3], [1, 4, 8], 8),
    ("mini", (20, 4, 8), [2, 2, 2], [1, 4, 8], 32),
    ("mini", (29, 8, 8), [3, 3, 3], [1, 4, 8], 32),
    ("imagenet", (50, 4, 32), [3, 4, 6, 3], [1, 16, 32], 64),
    ("imagenet", (101, 4, 32), [3, 4, 23, 3], [16], 64),
    ("imagenet", (101, 4, 64), [3, 4, 23, 3], [32], 64),
]


def images(size):
    return torch.randn(4, 3, size, size)


def rms(x):
    return x.detach().square().mean().sqrt().item()


@torch.no_grad()
def growth_of_plain(model, x):
    """How many times larger the output of the last block is than that of the first, at initialization."""
    for conv in (part for part in model.modules() if isinstance(part, torch.nn.Conv2d)):
        torch.nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    ends = {}
    for number in (0, len(model.blocks) - 1):
        model.blocks[number].register_forward_hook(lambda _m, _i, y, number=number: ends.update({number: rms(y)}))
    model(x)
    return ends[len(model.blocks) - 1] / ends[0]


@torch.no_grad()
def growth_of_ours(model, x):
    """The same: a block's output is what the next layer reads, or the output of the stack."""
    ends = []
    second = model.stack.blocks[1]
    second = second if not model.stack.layout.layered else second[0]
    second.register_forward_pre_hook(lambda _m, inputs: ends.append(rms(inputs[0])))
    model.stack.register_forward_hook(lambda _m, _i, y: ends.append(rms(y)))
    model(x)
    return ends[1] / ends[0]


@pytest.mark.parametrize(
    ("stem", "depth", "stages", "fan_in", "size"),
    [(stem, depth, stages, k, size) for stem, depth, stages, ks, size in RESNETS for k in ks],
)
def test_resnet_grows_no_more_than_the_plain_one(stem, depth, stages, fan_in, size):
    x = images(size)
    plain = growth_of_plain(PlainResNet(stem, stages, 10, deep=stem == "imagenet"), x)
    assert 0.25 < growth_of_ours(mc.resnet(depth, 10, fan_in, stem=stem), x) < 1.5 * plain


@pytest.mark.parametrize(
    ("stem", "shape", "stages", "fan_in", "size"),
    [
        pytest.param(
            stem,
            shape,
            stages,
            k,
            size,
            marks=[pytest.mark.slow] * ((stem == "imagenet" and k != 16) or shape[0] == 101),
        )
        for stem, shape, stages, ks, size in RESNEXTS
        for k in ks
    ],
)
def test_resnext_grows_no_more_than_the_plain_one(stem, shape, stages, fan_in, size):
    x, (_, width, cardinality) = images(size), shape
    stem_width = 64 if stem == "imagenet" or width == 64 else 16
    plain = growth_of_plain(PlainResNeXt(stem, stages, width, cardinality, 10, "sum", stem_width), x)
    for norm in ("branch", "sum"):
        assert 0.25 < growth_of_ours(mc.resnext(*shape, 10, fan_in, stem=stem, norm=norm), x) < 1.5 * plain, norm


def test_a_bare_sum_grows_without_bound_and_says_so_once():
    model, x = mc.resnet(110, 10, fan_in=20, aggregation="sum"), images(16)
    with pytest.warns(UserWarning, match=r"activations grow .*e\+\d+ times .* is 'sum', use 'mean'\.") as said:
        assert growth_of_ours(model, x) > 1e4
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        mc.resnet(110, 10, fan_in=20, aggregation="sum").eval()(x)


def test_without_the_small_start_in_the_last_module_resnexts_grow_too_much():
    x = images(16)
    plain = growth_of_plain(PlainResNeXt("cifar", [3, 3, 3], 8, 8, 10, "sum"), x)
    for fan_in in (1, 4, 8):
        model = mc.resnext(29, 8, 8, 10, fan_in)
        for branch in model.stack.blocks[-1]:
            torch.nn.init.ones_(branch.residual[-1].weight)
        assert growth_of_ours(model, x) > 1.5 * plain


def test_growth_is_looked_at_in_passes_that_are_powers_of_two():
    watch, looked = GrowthWatch(), []
    for number in range(1, 20):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            watch.look(torch.ones(2), torch.full((2,), 1e6))
        looked += [number] * len(said)
        watch._warned = False
    assert looked == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (torch.zeros(3), torch.ones(3)),
        (torch.ones(3), torch.full((3,), 9e3)),
        (torch.ones(3, dtype=torch.int64), torch.full((3,), 10**6)),
        (torch.ones(3, device="meta"), torch.ones(3, device="meta")),
        ((torch.ones(3),), torch.ones(3)),
        (torch.ones(0), torch.ones(0)),
    ],
)
def test_growth_that_is_none_or_cannot_be_seen_is_not_a_reason_to_warn(first, last):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        GrowthWatch().look(first, last)
    assert said == []
