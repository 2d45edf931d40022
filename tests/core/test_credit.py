"""What of a source counts for its mask: the whole of it, or what is new in it."""

import copy

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers

import maskconnect as mc
from maskconnect.core.reference import reference

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mask_gradient(stack, x=X):
    stack(x).square().sum().backward()
    return stack.masks.real.grad


@pytest.mark.parametrize("aggregation", ["mean", "sum", "root"])
@pytest.mark.parametrize("fan_in", [1, 2, 3])
def test_it_is_the_gradient_of_the_readable_path(fan_in, aggregation):
    stack = mc.MaskedStack(conv_blocks(), fan_in, aggregation=aggregation, mask_credit="new").double()
    twin, whole = copy.deepcopy(stack), copy.deepcopy(stack)
    whole.mask_credit = "whole"
    found = mask_gradient(stack)
    with reference():
        torch.testing.assert_close(found, mask_gradient(twin))
    assert not torch.allclose(found, mask_gradient(whole))
    for (name, ours), (_, theirs) in zip(stack.named_parameters(), whole.named_parameters(), strict=True):
        if name != "masks.real":
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_the_part_along_the_input_is_left_out_so_that_active_sources_have_nothing_in_common():
    stack = mc.MaskedStack(conv_blocks(), 3, mask_credit="new").double()
    grad = mask_gradient(stack)
    active = stack.masks.binary
    largest = grad.abs().max()
    assert (grad * active).sum(dim=1).abs().max() < 1e-12 * largest
    assert (grad[-1][~active[-1]] != 0).all()


def test_a_lone_source_has_nothing_new():
    stack = mc.MaskedStack(mlp_blocks(5), 1, mask_credit="new").double()
    grad = mask_gradient(stack, torch.randn(3, 6, dtype=torch.float64))
    assert grad[stack.masks.binary].abs().max() < 1e-12 * grad.abs().max()


def test_a_silent_input_gives_no_gradient_that_is_not_finite():
    stack = mc.MaskedStack([torch.nn.Identity() for _ in range(4)], 2, mask_credit="new")
    assert mask_gradient(stack, torch.zeros(3, 6)).isfinite().all()


def test_it_goes_with_sums_of_ours_only():
    with pytest.raises(mc.ConfigError, match="mask_credit is 'old'; it must be one of whole, new"):
        mc.MaskedStack(mlp_blocks(3), 1, mask_credit="old")
    for modules, aggregation in ((mlp_blocks(3), "scaled"), (mlp_layers(2, 2), lambda sources, mask: sources[0])):
        with pytest.raises(mc.ConfigError, match="it works with the aggregations mean, residual, sum and root only"):
            mc.MaskedStack(modules, 1, aggregation=aggregation, mask_credit="new")
