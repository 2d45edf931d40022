"""What of a source counts for its mask: the whole of it, or what is new in it."""

import copy

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers

import maskconnect as mc

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def new(stack):
    """The stack, whose masks learn by what is new in a source."""
    stack.masks.learn_by(mc.Draw(credit="new"))
    return stack


def mask_gradient(stack, x=X):
    stack(x).square().sum().backward()
    return stack.masks.real.grad


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
@pytest.mark.parametrize("fan_in", [1, 2, 3])
def test_it_is_the_gradient_of_the_readable_path(fan_in, aggregation):
    stack = new(mc.MaskedStack(conv_blocks(), fan_in, aggregation=aggregation)).double()
    twin, whole = copy.deepcopy(stack), copy.deepcopy(stack)
    whole.masks.learn_by(mc.Draw())
    found = mask_gradient(stack)
    with mc.reference():
        torch.testing.assert_close(found, mask_gradient(twin))
    assert not torch.allclose(found, mask_gradient(whole))
    for (name, ours), (_, theirs) in zip(stack.named_parameters(), whole.named_parameters(), strict=True):
        if name != "masks.real":
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_the_part_along_the_input_is_left_out_so_that_active_sources_have_nothing_in_common():
    stack = new(mc.MaskedStack(conv_blocks(), 3)).double()
    grad = mask_gradient(stack)
    active = stack.masks.binary
    largest = grad.abs().max()
    assert (grad * active).sum(dim=1).abs().max() < 1e-12 * largest
    assert (grad[-1][~active[-1]] != 0).all()


def test_a_lone_source_has_nothing_new():
    stack = new(mc.MaskedStack(mlp_blocks(5), 1)).double()
    grad = mask_gradient(stack, torch.randn(3, 6, dtype=torch.float64))
    assert grad[stack.masks.binary].abs().max() < 1e-12 * grad.abs().max()


def test_a_silent_input_gives_no_gradient_that_is_not_finite():
    stack = new(mc.MaskedStack([torch.nn.Identity() for _ in range(4)], 2))
    assert mask_gradient(stack, torch.zeros(3, 6)).isfinite().all()


def test_it_goes_with_sums_of_ours_only():
    with pytest.raises(mc.ConfigError, match="credit is 'old'; it must be one of whole, new"):
        mc.Draw(credit="old")
    for modules, aggregation in ((mlp_blocks(3), "scaled"), (mlp_layers(2, 2), lambda sources, mask: sources[0])):
        stack = mc.MaskedStack(modules, 1, aggregation=aggregation)
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.1))
        with pytest.raises(mc.ConfigError, match="it works with the aggregations mean, residual and sum only"):
            mc.attach(optimizer, stack, mc.Draw(credit="new"))
