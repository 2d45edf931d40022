"""Learned factors of connections: `aggregation="scaled"`."""

import copy

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers

import maskconnect as mc

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def stack_of(fan_in=2, **options):
    """A stack of three resolutions whose scales are all different."""
    stack = mc.MaskedStack(conv_blocks(), fan_in, aggregation="scaled", **options).double()
    with torch.no_grad():
        stack.scales.mul_(torch.rand(stack.scales.shape, dtype=torch.float64).add_(0.5))
    return stack


def gradients(stack):
    stack(X).square().sum().backward()
    return {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("connectivity", ["learned", "random", "full"])
def test_gradients_by_scales_masks_and_weights_are_those_of_the_readable_path(connectivity):
    stack = stack_of(connectivity=connectivity)
    twin = copy.deepcopy(stack)
    found = gradients(stack)
    with mc.reference():
        expected = gradients(twin)
    assert found.keys() == expected.keys() >= {"scales"}
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=name)
    assert ("masks.real" in found) == (connectivity == "learned")


def test_a_mask_learns_by_what_its_scale_makes_of_a_source():
    stack = stack_of()
    grads = gradients(stack)
    plain = grads["scales"] / stack.scales.detach()  # <g, y> of those that are active
    active = stack.masks.binary
    torch.testing.assert_close(grads["masks.real"][active], (plain * stack.scales.detach() ** 2)[active])
    assert (grads["scales"][~active] == 0).all()
    assert (grads["masks.real"][-1] != 0).all()


def test_it_starts_as_the_mean():
    blocks = mlp_blocks(5)
    x = torch.randn(3, 6)
    outputs = [mc.MaskedStack(blocks, 3, aggregation=kind)(x) for kind in ("scaled", "mean")]
    torch.testing.assert_close(*outputs)


def test_it_is_pruned_saved_and_loaded(tmp_path):
    stack = stack_of(connectivity="random").eval()
    slim = mc.prune(stack, X)
    torch.testing.assert_close(slim(X), stack(X), rtol=0, atol=1e-12)
    model = mc.resnet(14, 7, 2, aggregation="scaled")
    with torch.no_grad():
        model.stack.scales.mul_(1.5)
    mc.freeze(model)
    x = torch.randn(2, 3, 16, 16)
    for number, network in enumerate((model.eval(), mc.prune(model, x))):
        mc.save(network, tmp_path / str(number))
        torch.testing.assert_close(mc.load(tmp_path / str(number))(x), model(x), rtol=0, atol=1e-5)


def test_layers_have_a_scale_per_connection_and_their_output_is_a_mean():
    torch.manual_seed(0)
    layers = mlp_layers(2, 3)
    stack = mc.MaskedStack(layers, connectivity="full", aggregation="scaled")
    stack.scales.data.copy_(torch.rand(3, 3))
    x = torch.randn(4, 6)
    first = [module(x) for module in layers[0]]
    second = [
        module(sum(a * y for a, y in zip(row, first, strict=True)))
        for module, row in zip(layers[1], stack.scales, strict=True)
    ]
    torch.testing.assert_close(stack(x), sum(second) / 3)
