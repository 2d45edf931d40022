"""The sums of active sources and their gradients are those of Eq. 1 as it is written, differentiated by autograd."""

import pytest
import torch
from networks import mlp_blocks
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import both_ways

import maskconnect as mc
from maskconnect.core.reference import reference


def stack_of(seed, connectivity="learned", dtype=torch.float64):
    """A stack of random size, fan-in, aggregation and shapes, and an input for it."""
    choose = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=choose))

    torch.manual_seed(seed)
    channels, blocks = number(1, 4), []
    for _ in range(number(4, 9)):
        more, stride = number(0, 1), number(1, 2) if len(blocks) % 3 == 2 else 1
        conv = nn.Conv2d(
            channels, channels + more, 3, stride, padding=1, bias=False
        )  # before a norm it has no gradient
        channels += more
        blocks.append(nn.Sequential(conv, nn.BatchNorm2d(channels), nn.Tanh()))
    aggregation = ("mean", "sum")[seed % 2]
    stack = mc.MaskedStack(blocks, number(1, 4), connectivity=connectivity, aggregation=aggregation, seed=seed)
    x = torch.randn(number(2, 4), blocks[0][0].in_channels, number(9, 13), number(9, 13), generator=choose)
    return stack.to(dtype), x.to(dtype)


def backward_of(y):
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return y.detach()


@pytest.mark.parametrize("connectivity", ["learned", "random"])
@pytest.mark.parametrize("seed", range(12))
def test_steps_agree(seed, connectivity):
    stack, x = stack_of(seed, connectivity)

    def use(stack):
        for _ in range(2):
            y = backward_of(stack(x))
        return y

    both_ways(stack, use)
    stack.zero_grad()
    both_ways(stack.eval(), use)


@pytest.mark.parametrize("seed", range(4))
def test_channels_last_agrees(seed):
    stack, x = stack_of(seed)
    stack, x = stack.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    both_ways(stack, lambda s: backward_of(s(x)))


def test_two_backward_passes_agree():
    stack, x = stack_of(3)

    def use(stack):
        y = stack(x)
        y.sum().backward(retain_graph=True)
        return backward_of(y)

    both_ways(stack, use)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_agrees(reentrant):
    stack, x = stack_of(5)
    both_ways(stack, lambda s: backward_of(checkpoint(s, x.clone().requires_grad_(), use_reentrant=reentrant)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 0.05)], ids=str)
def test_autocast_agrees(dtype, tolerance):
    stack, x = stack_of(2, dtype=dtype)

    def use(stack):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = stack(x)
        return backward_of(y.to(dtype))

    both_ways(stack, use, tolerance)


def test_it_ends_with_the_block_and_with_an_error_in_it():
    from maskconnect.core.reference import is_reference

    with reference():
        assert is_reference()
        with reference():
            pass
        assert is_reference()
    with pytest.raises(ZeroDivisionError), reference():
        raise ZeroDivisionError
    assert not is_reference()


WAYS = {"draw": mc.Draw(), "new": mc.Draw(credit="new"), "blend": mc.Blend(steps=5)}
JOINS = ("mean", "sum", "residual", "scaled", "stream")


@pytest.mark.parametrize(
    ("aggregation", "how"),
    [(join, way) for join in JOINS for way in WAYS if way != "new" or join in ("mean", "sum", "residual")],
)
def test_a_gradient_penalty_is_right_by_reference_and_an_error_by_default(aggregation, how):
    def penalty(stack, x):
        (slope,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    blocks = mlp_blocks(4)
    modules = [mc.Residual(block) for block in blocks] if aggregation == "residual" else blocks
    stack = mc.MaskedStack(modules, 2, aggregation=aggregation).double()
    stack.masks.learn_by(WAYS[how])
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with mc.reference():
        penalty(stack, x).backward()
    assert stack.masks.real.grad.any()
    with pytest.raises(mc.ConnectivityError, match="does not support second-order gradients"):
        penalty(stack, x).backward()
