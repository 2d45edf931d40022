"""A forward pass drops outputs that no later target needs."""

import gc
from weakref import ref

import pytest
import torch
from networks import conv_blocks
from test_residual import residual_blocks
from torch import nn

import maskconnect as mc
from maskconnect.core.lifetimes import last_uses

X = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(0))
SHORT = [[], [0], [1], [2], [3], [4]]
"""Each module reads the one before it."""


class Watched(nn.Module):
    """Notes which outputs of all modules are alive when it runs."""

    def __init__(self, block, outputs, alive):
        super().__init__()
        self.block, self.outputs, self.alive = block, outputs, alive

    def forward(self, x):
        self.alive.append([k for k, y in enumerate(self.outputs) if y() is not None])
        y = self.block(x)
        self.outputs.append(ref(y[0] if isinstance(y, tuple) else y))
        return y


def alive_in(blocks, *, grad, **options):
    """Return which outputs are alive when each module runs."""
    outputs, alive = [], []
    stack = mc.MaskedStack([Watched(block, outputs, alive) for block in blocks], **options)
    gc.collect()
    with torch.set_grad_enabled(grad):
        stack(X)
    return alive


def linear_convs():
    return [nn.Conv2d(4, 4, 3, padding=1) for _ in SHORT]


def test_an_output_is_dropped_after_its_last_reader():
    alive = alive_in(linear_convs(), grad=False, connectivity=SHORT)
    assert alive[1:] == [[0], [0, 1], [0, 2], [0, 3], [0, 4]]  # the first is compared with the output of the stack


def test_an_output_stays_for_a_reader_far_away():
    alive = alive_in(linear_convs(), grad=False, connectivity=[[], [0], [1], [2], [1, 3], [4]])
    assert alive[3:] == [[0, 1, 2], [0], [0, 4]]  # module 4 reads a sum, and its sources are gone when it runs


def test_a_residual_block_leaves_only_its_input():
    blocks = [mc.Residual(nn.Conv2d(4, 4, 3, padding=1)) for _ in SHORT]
    alive = alive_in(blocks, grad=True, connectivity=SHORT, aggregation="residual")
    assert alive[5] == [0]  # the backward pass of a sum needs none of its terms


@pytest.mark.parametrize("how", [mc.Draw(), mc.Draw(images=2), mc.Blend(steps=9, images=2)], ids=str)
@pytest.mark.parametrize("aggregation", ["mean", "residual", "stream", "scaled"])
@pytest.mark.parametrize("wiring", [None, [[], [0], [0, 1], [0], [1, 2, 3], [2, 4]]], ids=["all", "some"])
def test_nothing_that_is_needed_is_dropped(aggregation, how, wiring):
    blocks = residual_blocks() if aggregation == "residual" else conv_blocks()
    given = None if wiring is None else wiring[: len(blocks)]
    stack = mc.MaskedStack(blocks, 2, aggregation=aggregation, wiring=given)
    stack.masks.learn_by(how)
    for _ in range(8):  # draws differ
        stack(X).sum().backward()
    stack.masks.learn_by(mc.Draw())
    mc.freeze(stack)
    stack(X).sum().backward()
    stack.eval()(X)


def test_outputs_stay_where_any_target_may_need_them():
    layers = mc.MaskedStack([[nn.Linear(4, 4), nn.Linear(4, 4)]] * 2, 1)
    for stack in (layers, mc.MaskedStack(conv_blocks(), 2, align=lambda y, shape: None)):
        inputs = stack.begin()
        assert not last_uses(inputs, inputs.outputs(X, stack.align, None))
