"""Mask gradients from some images of a batch: `images=b`."""

import copy

import pytest
import torch
from networks import conv_blocks, mlp_layers
from test_residual import residual_blocks
from torch import nn
from twins import both_ways

import maskconnect as mc
from maskconnect.core.rows import ROWS_PER_BLOCK

BATCH = 12
X = torch.randn(BATCH, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WAYS = {
    "draw": lambda **options: mc.Draw(**options),
    "blend": lambda **options: mc.Blend(steps=9, gradient="plain", **options),
}


def stack_of(aggregation, fan_in=2):
    blocks = residual_blocks() if aggregation == "residual" else conv_blocks()
    return mc.MaskedStack(blocks, fan_in, aggregation=aggregation).double()


def layers_of(fan_in=2):
    return mc.MaskedStack(mlp_layers(3, 4), fan_in).double()


def learning_by(stack, how):
    stack.masks.learn_by(how)
    with torch.no_grad():
        stack.masks.real.mul_(0.5 + 0.5 * torch.rand(stack.masks.real.shape, dtype=torch.float64))
    return stack


def backward(stack, x=X):
    y = stack(x)
    y.square().sum().backward()
    return y


JOINS = [(how, credit) for how in ("mean", "sum", "residual") for credit in ("whole", "new")] + [("stream", "whole")]


@pytest.mark.parametrize("fan_in", [1, 2, 4])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(("aggregation", "credit"), JOINS)
def test_the_fast_path_is_the_readable_one(aggregation, credit, way, fan_in):
    both_ways(learning_by(stack_of(aggregation, fan_in), WAYS[way](images=5, credit=credit)), backward)


@pytest.mark.parametrize("credit", ["whole", "new"])
@pytest.mark.parametrize("way", list(WAYS))
def test_the_fast_path_of_layers_is_the_readable_one(way, credit):
    x = torch.randn(BATCH, 6, dtype=torch.float64)
    both_ways(learning_by(layers_of(), WAYS[way](images=4, credit=credit)), lambda stack: backward(stack, x))


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("aggregation", ["mean", "residual", "stream"])
def test_over_every_choice_of_images_the_mean_is_the_whole_gradient(aggregation, way):
    whole = learning_by(stack_of(aggregation), WAYS[way]())
    sampled = copy.deepcopy(whole)
    sampled.masks.how = WAYS[way](images=4)
    start = copy.deepcopy(sampled.masks.state_dict())
    backward(whole)
    for shift in range(3):  # every third image is seen
        sampled.masks.load_state_dict(start)  # so that each draws the same
        backward(sampled, X.roll(shift, dims=0))
    torch.testing.assert_close(sampled.masks.real.grad / 3, whole.masks.real.grad)
    for (name, p), q in zip(sampled.blocks.named_parameters(), whole.blocks.parameters(), strict=True):
        torch.testing.assert_close(p.grad / 3, q.grad, msg=name)  # weights learn from all images


def test_more_images_than_there_are_is_all_of_them():
    whole = learning_by(stack_of("mean"), mc.Draw())
    sampled = copy.deepcopy(whole)
    sampled.masks.how = mc.Draw(images=BATCH + 1)
    for stack in (whole, sampled):
        backward(stack)
    assert torch.equal(sampled.masks.real.grad, whole.masks.real.grad)


@pytest.mark.parametrize(("aggregation", "way"), [("residual", "draw"), ("residual", "blend"), ("stream", "draw")])
def test_only_those_images_of_a_source_are_kept(aggregation, way):
    def kept(images):
        stack, found = stack_of(aggregation, 1), {}
        if aggregation == "stream":  # its blocks must not keep their outputs for themselves
            pooled = [nn.Sequential(block, nn.AvgPool2d(1)) for block in stack.blocks]
            stack = mc.MaskedStack(pooled, 1, aggregation=aggregation).double()
        learning_by(stack, WAYS[way](images=images))

        def note(y):
            found[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(note, lambda y: y):
            stack(X)
        return sum(found.values())

    assert kept(1) < 0.9 * kept(None)


@pytest.mark.parametrize("images", [0, -3, 2.5, "all"])
def test_a_number_of_images_that_cannot_be_is_refused(images):
    with pytest.raises(mc.ConfigError, match="images"):
        mc.Draw(images=images)


def test_there_may_be_more_sources_than_rows_in_a_matrix():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2 * ROWS_PER_BLOCK + 3)]
    stack = learning_by(mc.MaskedStack(blocks, 2).double(), mc.Draw(images=3, credit="new"))
    x = torch.randn(BATCH, 6, dtype=torch.float64)
    both_ways(stack, lambda model: backward(model, x))


class Half(nn.Linear):
    """Returns float16, whose sums are not kept from target to target."""

    def forward(self, x):
        return super().forward(x.float()).half()


def test_pairs_are_there_for_targets_with_other_fan_ins_if_no_running_sum_is_possible():
    blocks = [mc.Residual(Half(8, 8), Half(8, 8)) for _ in range(8)]
    stack = mc.MaskedStack(blocks, [1, 2, 3, 2, 4, 4, 4], aggregation="residual")
    learning_by(stack, mc.Draw(images=2))
    slow = copy.deepcopy(stack)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    stack(x).float().square().sum().backward()
    with mc.reference():
        slow(x).float().square().sum().backward()
    for p, q in zip(stack.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02 * float(q.grad.abs().max()))


class AddsInFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.float())


def test_sources_of_different_precision_are_sampled():
    stack = mc.MaskedStack([AddsInFloat32() for _ in range(5)], 2, aggregation="stream")
    mc.attach(torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.1)), stack, mc.Draw(images=2))
    stack(torch.randn(4, 4, dtype=torch.float64)).sum().backward()
    assert stack.masks.real.grad.isfinite().all()
