"""What `mc.metrics` says of the masks of a model."""

import math

import pytest
import torch
from networks import mlp_blocks
from torch import nn

import maskconnect as mc
from maskconnect.core.metrics import changes, connections, mask_entropy

X = torch.linspace(-1, 1, 18).reshape(3, 6)


def test_masks_are_undecided_at_first_and_certain_at_last():
    network = mc.resnet(14, 10, fan_in=2)
    assert mask_entropy(network) == pytest.approx(1)
    with torch.no_grad():
        network.stack.masks.real.zero_()
        network.stack.masks.real[:, 0] = 1
    assert mask_entropy(network) == 0


def test_entropy_is_the_mean_over_targets_that_have_a_choice():
    network = mc.resnet(8, 10, fan_in=1)  # blocks 1 and 2 read; block 1 has no choice
    with torch.no_grad():
        network.stack.masks.real.copy_(torch.tensor([[1.0, 0.0], [0.9, 0.1]]))
    expected = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)
    assert mask_entropy(network) == pytest.approx(expected)


def test_changes_count_the_connections_that_are_new():
    before = [[[], [0], [0, 1], [0, 2]], [[], [0]]]
    after = [[[], [0], [0, 1], [1, 2]], [[], [0]]]
    assert changes(before, after) == 1
    assert changes(before, before) == 0
    network = mc.resnext(11, 4, 4, 10, fan_in=2)
    start = connections(network)
    with torch.no_grad():
        network.stack.masks.real[0] = torch.tensor([0.0, 0.0, 0.5, 0.5])  # branch 0 of layer 1 had read 0 and 1
    assert changes(start, connections(network)) == 2


def test_a_row_of_zeros_is_as_undecided_as_a_uniform_one():
    network = mc.resnet(8, 10, fan_in=1)
    with torch.no_grad():
        network.stack.masks.real[1] = 0
    assert mask_entropy(network) == 1


@torch.no_grad()
def prefer(stack, target, *sources):
    """Make these the most likely sources of a target; targets count from the second module."""
    row = torch.zeros_like(stack.masks.real[target])
    row[list(sources)] = 1 / len(sources)
    stack.masks.real[target] = row


def test_at_the_start_nothing_is_decided_and_nothing_has_moved():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    weights = mc.count_parameters(stack).weights
    assert mc.metrics(stack) == pytest.approx(
        {
            "masks/entropy": 1.0,
            "masks/moved": 0.0,
            "masks/alive": 5.0,
            "masks/progress": 0.0,
            "masks/temperature": 1.0,
            "masks/frozen": 0.0,
            "masks/parameters": weights,
        }
    )


def test_a_module_that_is_left_out_is_missing_from_what_pruning_leaves():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=1)
    prefer(stack, 3, 1)  # module 4 reads 1, so 2 and 3 cannot reach the output
    found = mc.metrics(stack)
    assert found["masks/alive"] == 3
    assert found["masks/parameters"] == 3 * mc.count_parameters(stack.blocks[0]).weights
    assert found["masks/moved"] == pytest.approx(1 / 4)
    mc.freeze(stack)
    assert mc.count_parameters(mc.prune(stack, X)).weights == found["masks/parameters"]


def test_changes_are_counted_since_a_wiring_that_the_caller_kept():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    first = mc.wiring_of(stack)
    prefer(stack, 3, 0, 1)  # instead of 2 and 3
    second = mc.wiring_of(stack)
    prefer(stack, 3, 0, 3)
    assert mc.metrics(stack, first)["masks/changes"] == 1
    assert mc.metrics(stack, second)["masks/changes"] == 1
    assert mc.metrics(stack, mc.wiring_of(stack))["masks/changes"] == 0
    assert "masks/changes" not in mc.metrics(stack)


def test_several_stacks_are_counted_together():
    model = nn.Sequential(mc.MaskedStack(mlp_blocks(4), fan_in=1), mc.MaskedStack(mlp_blocks(3), fan_in=1, seed=1))
    before = mc.wiring_of(model)
    prefer(model[0], 2, 0)
    prefer(model[1], 1, 0)
    found = mc.metrics(model, before)
    assert found["masks/alive"] == 2 + 2
    assert found["masks/changes"] == 2
    assert found["masks/moved"] == pytest.approx(2 / 5)


def test_progress_temperature_and_the_freeze_are_told():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    mc.attach(optimizer, stack, mc.Blend(steps=3))
    for step, temperature in enumerate([1.0, 0.5, 0.0]):
        found = mc.metrics(stack)
        assert (found["masks/progress"], found["masks/temperature"]) == (step, temperature)
        stack(X).sum().backward()
        optimizer.step()
    mc.freeze(stack)
    found = mc.metrics(stack)
    assert (found["masks/progress"], found["masks/temperature"], found["masks/frozen"]) == (3, 0, 1)


def test_asking_changes_nothing():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    saved = {name: value.clone() for name, value in stack.state_dict().items()}
    mc.metrics(stack, mc.wiring_of(stack))
    for name, value in stack.state_dict().items():
        assert torch.equal(value, saved[name]), name


def test_frozen_masks_have_no_temperature():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    assert mc.metrics(stack)["masks/temperature"] == 1
    mc.freeze(stack)
    assert mc.metrics(stack)["masks/temperature"] == 0


def test_connections_that_are_fixed_do_not_count_as_learned():
    fixed = mc.MaskedStack(mlp_blocks(9), connectivity="prev")
    learned = mc.MaskedStack(mlp_blocks(3), fan_in=1)
    prefer(learned, 1, 0)
    assert mc.metrics(nn.Sequential(fixed, learned))["masks/moved"] == pytest.approx(1 / 2)


def test_a_fixed_wiring_has_not_moved():
    assert mc.metrics(mc.MaskedStack(mlp_blocks(5), fan_in=1, connectivity="random"))["masks/moved"] == 0


def test_the_wiring_of_another_model_is_an_error():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    with pytest.raises(mc.ConnectivityError, match="before"):
        mc.metrics(stack, mc.wiring_of(mc.MaskedStack(mlp_blocks(4), fan_in=2)))
    with pytest.raises(mc.ConfigError, match=r"another model; pass an earlier mc\.wiring_of"):
        mc.metrics(nn.Sequential(stack, mc.MaskedStack(mlp_blocks(5), fan_in=2)), mc.wiring_of(stack))
    with pytest.raises(mc.ConfigError, match="there is no MaskedStack"):
        mc.metrics(nn.Linear(2, 2))
