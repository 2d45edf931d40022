"""What a run tells about masks and activations."""

import math

import pytest
import torch

import maskconnect as mc
from maskconnect.training.diagnostics import activation_scales, changes, connections, mask_entropy


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


@pytest.mark.parametrize("make", [lambda: mc.resnet(14, 10, fan_in=5), lambda: mc.resnext(20, 4, 2, 10, fan_in=2)])
def test_scales_are_those_of_what_modules_read(make):
    network = make().eval()
    x = torch.randn(3, 3, 16, 16)
    found = activation_scales(network, x)
    assert len(found) == 7
    first = network.stem(x)
    assert found[0] == pytest.approx(first.square().mean().sqrt().item(), rel=1e-4)
    last = network.stack(first)
    assert found[-1] == pytest.approx(last.square().mean().sqrt().item(), rel=1e-4)
    assert activation_scales(network, 0 * x)[0] != found[0]


def test_modules_that_are_not_run_have_no_scale():
    network = mc.resnet(14, 10, connectivity=[[], [0], [0], [2], [3], [4]]).eval()
    network(torch.randn(2, 3, 16, 16))  # after which the shape of block 1 is known
    found = activation_scales(network, torch.randn(2, 3, 16, 16))
    assert [scale is None for scale in found] == [False, True, False, False, False, False, False]


def test_a_row_of_zeros_is_as_undecided_as_a_uniform_one():
    network = mc.resnet(8, 10, fan_in=1)
    with torch.no_grad():
        network.stack.masks.real[1] = 0
    assert mask_entropy(network) == 1
