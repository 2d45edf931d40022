"""The fast path of blended chains: all sources of a target by one matrix product, and all gradients of a source."""

import copy

import pytest
import torch
from networks import conv_blocks
from test_residual import residual_blocks
from torch import nn
from twins import assert_same, both_ways

import maskconnect as mc
from maskconnect.core import targets
from maskconnect.core.rows import TOGETHER

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def blending(stack, **options):
    stack.masks.learn_by(mc.Blend(steps=9, gradient="plain", **options))
    with torch.no_grad():
        stack.masks.real.mul_(0.5 + 0.5 * torch.rand(stack.masks.real.shape, dtype=torch.float64))
    return stack


def stack_of(aggregation="residual", fan_in=2, **options):
    blocks = residual_blocks() if aggregation == "residual" else conv_blocks()
    return blending(mc.MaskedStack(blocks, fan_in, aggregation=aggregation).double(), **options)


def backward(stack, x=X):
    y = stack(x)
    y.square().sum().backward()
    return y


@pytest.fixture
def taken(monkeypatch):
    """How often the fast path was taken."""
    calls = []

    def counted(*args):
        calls.append(args)
        return original(*args)

    original = targets.blended_total
    monkeypatch.setattr(targets, "blended_total", counted)
    return calls


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("fan_in", [1, 2, 3])
@pytest.mark.parametrize("aggregation", ["mean", "sum", "residual", "stream"])
def test_it_is_the_readable_path(aggregation, fan_in, layout, taken):
    stack = stack_of(aggregation, fan_in).to(memory_format=layout)
    both_ways(stack, lambda model: backward(model, X.contiguous(memory_format=layout)))
    assert len(taken) == 5 - fan_in  # those that have more candidates than they may read


def test_there_may_be_more_sources_than_rows_in_a_matrix(taken):
    bodies = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2 * TOGETHER + 3)]
    stack = blending(mc.MaskedStack(bodies, 2).double())
    both_ways(stack, lambda model: backward(model, torch.ones(3, 6, dtype=torch.float64)))
    assert len(taken) == 2 * TOGETHER


def test_a_graph_can_be_gone_through_twice(taken):
    stack = stack_of()
    twin = copy.deepcopy(stack)
    loss = stack(X).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with mc.reference():
        backward(twin)
    for p in twin.parameters():
        p.grad *= 2
    assert_same(stack, twin)


def test_a_backward_pass_that_failed_half_way_leaves_nothing_behind():
    stack = stack_of()
    twin = copy.deepcopy(stack)
    loss = stack(X).square().sum()

    def fail(grad):
        handle.remove()
        raise RuntimeError("stop")

    handle = next(stack.blocks[2].parameters()).register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        loss.backward(retain_graph=True)
    stack.zero_grad()
    loss.backward()
    with mc.reference():
        backward(twin)
    assert_same(stack, twin)


def test_gradients_can_be_asked_for_one_by_one():
    stack = stack_of()
    twin = copy.deepcopy(stack)
    x = X.clone().requires_grad_()
    first = next(stack.blocks[1].parameters())
    by_x, by_first, by_mask = torch.autograd.grad(stack(x).square().sum(), [x, first, stack.masks.real])
    with mc.reference():
        expected = torch.autograd.grad(twin(x).square().sum(), [x, next(twin.blocks[1].parameters()), twin.masks.real])
    for found, wanted in zip((by_x, by_first, by_mask), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_hooks_see_the_gradient_of_an_output():
    stack, seen = stack_of("mean"), []
    twin = copy.deepcopy(stack)
    for model in (stack, twin):
        model.blocks[1].register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0]))
    backward(stack)
    with mc.reference():
        backward(twin)
    torch.testing.assert_close(*seen)


def test_half_precision_takes_the_other_path(taken):
    stack = stack_of("mean").float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = stack(X.float()).square().sum()
    loss.backward()
    assert not taken
    assert stack.masks.real.grad.isfinite().all()


def test_a_module_may_change_its_input_in_place():
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(5)]
    stack = blending(mc.MaskedStack(blocks, 2).double())
    both_ways(stack, lambda model: backward(model, torch.randn(3, 6, dtype=torch.float64, generator=_fixed())))


def _fixed():
    return torch.Generator().manual_seed(1)
