"""A stream that every module reads and adds to: `aggregation="stream"`."""

import copy

import pytest
import torch
from networks import conv_blocks, mlp_layers, option_a
from twins import both_ways

import maskconnect as mc

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def stack_of(fan_in=2, **options):
    return mc.MaskedStack(conv_blocks(), fan_in, aggregation="stream", **options).double()


def by_hand(blocks, mask_TS, x):
    """x_j = x + sum_k m_jk F_k; the output is x and all that was added to it."""
    added = [blocks[0](x)]
    for t, block in enumerate(blocks[1:]):
        shape = added[-1].shape
        added.append(block(option_a(x, shape) + sum(mask_TS[t, k] * option_a(y, shape) for k, y in enumerate(added))))
    return sum(option_a(y, added[-1].shape) for y in (x, *added))


@pytest.mark.parametrize("fan_in", [1, 2, 5])
def test_outputs_and_gradients_of_a_pass_that_learns_are_those_of_the_rule(fan_in):
    stack = stack_of(fan_in)
    twin = copy.deepcopy(stack)
    found = stack(X)
    mask = stack.masks.binary.double().requires_grad_()
    expected = by_hand(twin.blocks, mask, X)
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    torch.testing.assert_close(stack.masks.real.grad, mask.grad)
    for (name, p), q in zip(stack.blocks.named_parameters(), twin.blocks.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("connectivity", ["learned", "random", "full", "prev"])
def test_the_fast_path_is_the_readable_one(connectivity):
    def use(model):
        y = model(X)
        y.square().sum().backward()
        return y

    both_ways(stack_of(2, connectivity=connectivity), use)


def test_reading_everything_is_a_plain_residual_network():
    stack = stack_of(connectivity="full", fan_in=None)
    x = X
    for block in stack.blocks:
        y = block(x)
        x = option_a(x, y.shape) + y
    torch.testing.assert_close(stack(X), x)


def test_every_module_reaches_the_output_so_none_is_pruned():
    stack = stack_of(1, connectivity=[[], [0], [0], [0], [0], [0]]).eval()
    assert all(stack.masks.current_wiring().alive)
    slim = mc.prune(stack, X)
    assert mc.count_parameters(slim) == mc.count_parameters(stack)._replace(mask_entries=0)
    torch.testing.assert_close(slim(X), stack(X))


def test_the_input_may_be_changed_in_place_by_the_first_module():
    blocks = [torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(6, 6)) for _ in range(3)]
    stack = mc.MaskedStack(blocks, 1, aggregation="stream", connectivity="prev").eval()
    x = torch.randn(5, 6)
    first = blocks[0](x.clone())
    second = blocks[1](x + first)
    torch.testing.assert_close(stack(x.clone()), x + first + second + blocks[2](x + second))
    torch.testing.assert_close(mc.prune(stack, x.clone())(x.clone()), stack(x.clone()))


def test_layers_of_branches_have_no_stream():
    with pytest.raises(mc.ConfigError, match="aggregation is 'stream'; that is for a list of modules"):
        mc.MaskedStack(mlp_layers(2, 2), 1, aggregation="stream")


def test_an_input_that_cannot_be_aligned_is_named():
    said = r"the input of the stack has shape \(1, 2, 4\) and cannot feed module 1, which needs \(1, 3, 4\)"
    with pytest.raises(mc.ConnectivityError, match=said):
        mc.MaskedStack([torch.nn.Conv1d(2, 3, 1), torch.nn.Conv1d(3, 3, 1)], 1, aggregation="stream")(
            torch.ones(1, 2, 4)
        )


def test_a_sum_in_half_precision_overflows_neither_while_learning_nor_after():
    class Adds(torch.nn.Module):
        def forward(self, x):
            return torch.full_like(x, 40000)

    class Reads(torch.nn.Module):
        def forward(self, x):
            self.read = x
            return torch.zeros_like(x)

    stack = mc.MaskedStack([Adds(), Adds(), Reads()], 2, aggregation="stream")
    x = torch.full((1, 2), -60000.0, dtype=torch.float16)
    for training in (True, False):
        stack.train(training)(x)
        assert stack.blocks[2].read.tolist() == [[20000, 20000]]
