"""What a run tells about activations."""

import pytest
import torch

import maskconnect as mc
from maskconnect.training.diagnostics import activation_scales


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
