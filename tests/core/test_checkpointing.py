"""Activation checkpointing: the forward pass that is run again must see the same masks."""

import copy
import gc

import pytest
import torch
from networks import mlp_blocks, mlp_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


def gradients(stack):
    return [p.grad for p in stack.parameters()]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("make", [lambda: mlp_blocks(7), lambda: mlp_layers(3, 4)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_stack_trains_exactly_as_one_that_is_not(make, reentrant):
    stack = mc.MaskedStack(make(), fan_in=2)
    twin = copy.deepcopy(stack)
    for step in range(4):
        x = (X + step).requires_grad_()
        checkpoint(stack, x, use_reentrant=reentrant).square().sum().backward()
        twin(X + step).square().sum().backward()
        assert torch.equal(stack.masks.binary, twin.masks.binary)
        assert_same(gradients(stack), gradients(twin))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_around_a_stack_does_so_too(reentrant):
    stack, head = mc.MaskedStack(mlp_blocks(7), fan_in=2), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    twin = copy.deepcopy(stack)
    for step in range(3):
        x = (X + step).requires_grad_()
        checkpoint(lambda x: head(stack(x)), x, use_reentrant=reentrant).square().sum().backward()
        head(twin(X + step)).square().sum().backward()
        assert_same(gradients(stack), gradients(twin))


def test_checkpointed_modules_inside_a_stack_change_nothing():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    twin = copy.deepcopy(stack)
    for i, block in enumerate(stack.blocks):
        stack.blocks[i] = Checkpointed(block)
    for x in (X, 2 * X):
        stack(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert_same(gradients(stack), gradients(twin))


def test_a_checkpointed_frozen_stack_works():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    mc.freeze(stack)
    twin = copy.deepcopy(stack)
    checkpoint(stack, X, use_reentrant=False).square().sum().backward()
    twin(X).square().sum().backward()
    assert_same(gradients(stack.blocks), gradients(twin.blocks))


def test_a_checkpointed_stack_with_dropout_inside_works():
    stack = mc.MaskedStack([nn.Sequential(block, nn.Dropout(0.3)) for block in mlp_blocks(6)], fan_in=2)
    twin = copy.deepcopy(stack)
    for run in (lambda: checkpoint(stack, X, use_reentrant=False), lambda: twin(X)):
        torch.manual_seed(3)
        run().square().sum().backward()
    assert_same(gradients(stack), gradients(twin))


def test_two_checkpointed_passes_in_flight_are_a_clear_error():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    losses = [checkpoint(stack, X * factor, use_reentrant=False).square().sum() for factor in (1, 2)]
    with pytest.raises(mc.ConnectivityError, match="2 of its forward passes in flight"):
        sum(losses).backward()


@pytest.mark.parametrize("second", ["reentrant", "plain"])
def test_with_reentrant_checkpoints_several_passes_may_be_in_flight(second):
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=1)
    twin = copy.deepcopy(stack)
    x = X.clone().requires_grad_()
    losses = [
        checkpoint(stack, x, use_reentrant=True).square().sum(),
        (checkpoint(stack, 2 * x, use_reentrant=True) if second == "reentrant" else stack(2 * X)).square().sum(),
    ]
    sum(losses).backward()
    for inputs in (X, 2 * X):
        twin(inputs).square().sum().backward()
    for found, expected in zip(gradients(stack), gradients(twin), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_stack_that_runs_twice_inside_one_checkpoint_is_a_clear_error():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    for reentrant in (False, True):
        x = X.clone().requires_grad_()
        output = checkpoint(lambda x: stack(stack(x)), x, use_reentrant=reentrant)
        with pytest.raises(mc.ConnectivityError, match="2 of its forward passes in flight"):
            output.sum().backward()


def test_nested_reentrant_checkpoints():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    twin = copy.deepcopy(stack)
    x = X.clone().requires_grad_()

    def inner(x):
        return checkpoint(stack, x, use_reentrant=True)

    checkpoint(inner, x, use_reentrant=True).square().sum().backward()
    twin(X).square().sum().backward()
    assert_same(gradients(stack), gradients(twin))


def test_a_second_backward_pass_over_a_retained_graph():
    stack, head = mc.MaskedStack(mlp_blocks(7), fan_in=2), nn.Tanh()
    twin = copy.deepcopy(stack)
    for model, loss in (
        (stack, checkpoint(lambda x: head(stack(x)), X, use_reentrant=False).square().sum()),
        (twin, head(twin(X)).square().sum()),
    ):
        loss.backward(retain_graph=True)
        loss.backward()
        assert model.masks.real.grad is not None
    assert_same(gradients(stack), gradients(twin))


def test_a_pass_whose_graph_is_gone_is_not_in_flight():
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    twin = copy.deepcopy(stack)
    for model in (stack, twin):
        model(X)  # its output is dropped, and the graph with it
    kept = stack(X).square().sum()
    kept.backward()  # still referred to, but its backward pass is over
    twin(X).square().sum().backward()
    checkpoint(stack, X, use_reentrant=False).square().sum().backward()
    twin(X).square().sum().backward()
    assert_same(gradients(stack), gradients(twin))


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_without_gradient_do_not_confuse_a_checkpoint(reentrant):
    stack = mc.MaskedStack(mlp_blocks(7), fan_in=2)
    twin = copy.deepcopy(stack)
    for _ in range(2):
        for model in (stack, twin):
            with torch.no_grad():
                model(X)
        x = X.clone().requires_grad_()
        loss = checkpoint(stack, x, use_reentrant=reentrant).square().sum()
        other = twin(X).square().sum()
        for model in (stack, twin):
            with torch.no_grad():
                model(X)
        loss.backward()
        other.backward()
    assert_same(gradients(stack), gradients(twin))


def test_a_stack_that_returns_a_tuple_can_be_checkpointed():
    class Last(nn.Linear):
        def forward(self, x):
            return (super().forward(x).tanh(),)

    stack = mc.MaskedStack([*mlp_blocks(5), Last(6, 6)], fan_in=2)
    twin = copy.deepcopy(stack)
    checkpoint(stack, X, use_reentrant=False)[0].square().sum().backward()
    twin(X)[0].square().sum().backward()
    assert_same(gradients(stack), gradients(twin))


def test_nothing_is_kept_of_passes_that_are_over():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    for _ in range(10):
        stack(X).sum().backward()
    gc.collect()
    assert len(stack._in_flight._waiting) == 0
    assert len(stack._in_flight._reached) <= 1
