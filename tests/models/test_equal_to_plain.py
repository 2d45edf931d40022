"""Fixed wirings of ours are exactly the plain networks that the paper starts from."""

import copy
from functools import partial

import pytest
import torch
from plain import PlainResNet, PlainResNeXt, resnet_as_plain, resnext_as_plain
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def distance(found, wanted, scale=None):
    """The largest difference, relative to the largest entry, or to `scale`."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / (scale or wanted.abs().max().clamp(min=1e-12)))


def assert_near(found, wanted, dtype, name, scale=None):
    difference = distance(found, wanted, scale)
    assert difference < TOLERANCE[dtype], f"{name}: {difference:.1e}"


def assert_same_network(ours, reference, as_plain, x, delicate=False):
    """Outputs, weight gradients and running statistics in train mode; outputs in eval mode after that.

    Gradients are compared relative to the largest entry of each tensor. Of a `delicate` network, relative to that of
    all of them; and its running statistics are held against those of the plain one in float64 (`assert_as_exact`).
    """
    reference.load_state_dict(as_plain(ours))
    exact = copy.deepcopy(reference).double() if delicate else reference
    labels = torch.arange(len(x)) % 10
    for model in (ours, reference):
        model.train()
    found, wanted = ours(x), reference(x)
    assert_near(found, wanted, x.dtype, "train")
    F.cross_entropy(found, labels).backward()
    F.cross_entropy(wanted, labels).backward()
    gradients = as_plain(ours, pick=lambda t: t.grad if t.requires_grad else torch.empty(1))
    largest = max(p.grad.abs().max() for p in reference.parameters())
    for name, p in reference.named_parameters():
        assert_near(gradients[name], p.grad, x.dtype, name, scale=largest if delicate else None)
    buffers = as_plain(ours)
    if delicate:
        exact.train()(x.double())
        assert_as_exact(buffers, dict(reference.named_buffers()), dict(exact.named_buffers()))
    else:
        for name, buffer in reference.named_buffers():
            assert_near(buffers[name], buffer, x.dtype, name)
    assert_near(ours.eval()(x), reference.eval()(x), x.dtype, "eval")


def assert_as_exact(ours, plain, right):
    """Ours are as near to the right ones as those of the plain network are, within a factor of two."""
    rounding = max(distance(plain[name], buffer) for name, buffer in right.items())
    assert rounding < 5e-4
    for name, buffer in right.items():
        assert distance(ours[name], buffer) < max(TOLERANCE[torch.float32], 2 * rounding), name


@torch.no_grad()
def perturbed(model, dtype, bias=0.0):
    """Batch norms away from where they start, so that their weights matter."""
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.weight.add_(0.1 * torch.randn_like(norm.weight))
        norm.bias.add_(0.1 * torch.randn_like(norm.bias) + bias)
    return model.to(dtype)


# In float32 a large network has activations so near to a kink of a ReLU that rounding decides its gradient: of the
# plain network alone, gradients in float32 and float64 differ by up to a quarter. There, biases keep away from kinks;
# then some gradients are sums that cancel to nothing, so all are held against the largest. (In float64, each is held
# against itself, without such care.) Running statistics of the last modules of {50,4,32} are of 16 numbers: on a
# machine with AVX-512 those of the plain network in float32 are 1.5e-4 from those in float64, ours 1.0e-4.
LARGE = ("{29,8,8}", "{29,64,8}", "imagenet {50,4,32}")
RESNEXTS = {  # kind, stages, width, cardinality, stem width, image size
    "{20,4,8}": ("cifar", [2, 2, 2], 4, 8, 16, 16),
    "mini {20,4,8}": ("mini", [2, 2, 2], 4, 8, 16, 24),
    "{29,8,8}": ("cifar", [3, 3, 3], 8, 8, 16, 12),
    "{29,64,8}": ("cifar", [3, 3, 3], 64, 8, 64, 8),
    "imagenet {50,4,32}": ("imagenet", [3, 4, 6, 3], 4, 32, 64, 64),
}


@pytest.mark.parametrize("norm", ["branch", "sum"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, torch.float64, marks=[pytest.mark.slow] * ("imagenet" in name)) for name in RESNEXTS]
    + [pytest.param(name, torch.float32, marks=[pytest.mark.slow] * (name in LARGE)) for name in RESNEXTS],
    ids=str,
)
def test_fan_in_equal_to_cardinality_is_exactly_resnext(name, norm, dtype):
    kind, stages, width, cardinality, stem_width, size = RESNEXTS[name]
    depth = 3 * sum(stages) + 2
    model = mc.resnext(depth, width, cardinality, 10, connectivity="full", stem=kind, norm=norm)
    reference = PlainResNeXt(kind, stages, width, cardinality, 10, norm, stem_width).to(dtype)
    x = torch.randn(4, 3, size, size, dtype=dtype)
    delicate = name in LARGE and dtype is torch.float32
    model = perturbed(model, dtype, bias=4.0 if delicate else 0.0)
    as_plain = partial(resnext_as_plain, norm=norm)
    assert_same_network(model, reference, as_plain, x, delicate=delicate)


@pytest.mark.parametrize("norm", ["branch", "sum"])
def test_learning_with_fan_in_equal_to_cardinality_is_resnext_too(norm):
    model = perturbed(mc.resnext(20, 4, 8, 10, fan_in=8, norm=norm), torch.float64)
    reference = PlainResNeXt("cifar", [2, 2, 2], 4, 8, 10, norm).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert model.stack.learning
    assert_same_network(model, reference, partial(resnext_as_plain, norm=norm), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "depth", "stages", "deep", "size"),
    [
        ("cifar", 38, [6, 6, 6], False, 16),
        ("mini", 20, [3, 3, 3], False, 24),
        ("imagenet", 18, [2, 2, 2, 2], False, 64),
        ("imagenet", 50, [3, 4, 6, 3], True, 64),
    ],
)
@pytest.mark.parametrize("aggregation", ["mean", "residual"])
def test_fixed_prev_is_exactly_resnet(aggregation, kind, depth, stages, deep, size, dtype):
    model = perturbed(mc.resnet(depth, 10, connectivity="prev", stem=kind, aggregation=aggregation), dtype)
    reference = PlainResNet(kind, stages, 10, deep).to(dtype)
    x = torch.randn(4, 3, size, size, dtype=dtype)
    assert_same_network(model, reference, resnet_as_plain, x)
