"""Fixed wirings of ours are exactly the plain networks that the paper starts from."""

from functools import partial

import pytest
import torch
from plain import PlainResNet, PlainResNeXt, resnet_as_plain, resnext_as_plain
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def assert_near(found, wanted, dtype, name, scale=None):
    """Equal, relative to the largest entry, or to `scale`."""
    found, wanted = found.detach(), wanted.detach()
    difference = float((found - wanted).abs().max() / (scale or wanted.abs().max().clamp(min=1e-12)))
    assert difference < TOLERANCE[dtype], f"{name}: {difference:.1e}"


def assert_same_network(ours, reference, as_plain, x, one_scale=False):
    """Outputs, weight gradients and running statistics in train mode; outputs in eval mode after that.

    Gradients are compared relative to the largest entry of each tensor, or of all of them (`one_scale`).
    """
    reference.load_state_dict(as_plain(ours))
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
        assert_near(gradients[name], p.grad, x.dtype, name, scale=largest if one_scale else None)
    buffers = as_plain(ours)
    for name, buffer in reference.named_buffers():
        assert_near(buffers[name].double(), buffer.double(), x.dtype, name)
    assert_near(ours.eval()(x), reference.eval()(x), x.dtype, "eval")


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
# against itself, without such care.)
LARGE = ("{29,8,8}", "{29,64,8}", "imagenet {50,4,32}")
RESNEXTS = {  # kind, stages, width, cardinality, stem width, image size
    "{20,4,8}": ("cifar", [2, 2, 2], 4, 8, 16, 16),
    "mini {20,4,8}": ("mini", [2, 2, 2], 4, 8, 16, 24),
    "{29,8,8}": ("cifar", [3, 3, 3], 8, 8, 16, 12),
    "{29,64,8}": ("cifar", [3, 3, 3], 64, 8, 64, 8),
    "imagenet {50,4,32}": ("imagenet", [3, 4, 6, 3], 4, 32, 64, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", ["branch", "sum"])
@pytest.mark.parametrize("name", RESNEXTS)
def test_fan_in_equal_to_cardinality_is_exactly_resnext(name, norm, dtype):
    kind, stages, width, cardinality, stem_width, size = RESNEXTS[name]
    depth = 3 * sum(stages) + 2
    model = mc.resnext(depth, width, cardinality, 10, connectivity="full", stem=kind, norm=norm)
    reference = PlainResNeXt(kind, stages, width, cardinality, 10, norm, stem_width).to(dtype)
    x = torch.randn(4, 3, size, size, dtype=dtype)
    delicate = name in LARGE and dtype is torch.float32
    model = perturbed(model, dtype, bias=4.0 if delicate else 0.0)
    as_plain = partial(resnext_as_plain, norm=norm)
    assert_same_network(model, reference, as_plain, x, one_scale=delicate)


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
def test_fixed_prev_is_exactly_resnet(kind, depth, stages, deep, size, dtype):
    model = perturbed(mc.resnet(depth, 10, connectivity="prev", stem=kind), dtype)
    reference = PlainResNet(kind, stages, 10, deep).to(dtype)
    x = torch.randn(4, 3, size, size, dtype=dtype)
    assert_same_network(model, reference, resnet_as_plain, x)
