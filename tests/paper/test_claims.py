"""What the paper says of the method, a test a claim."""

import pytest
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_fixed_prev_is_exactly_plain_sequential(aggregation, train):
    """Section 3.1: in prior architectures x_j <- y_{j-1}."""
    blocks = [nn.Sequential(block, nn.BatchNorm1d(6), nn.Dropout(0.2)) for block in mlp_blocks(8)]
    stack = mc.MaskedStack(blocks, connectivity="prev", aggregation=aggregation).train(train)
    found, expected = [], []
    for run, results in ((stack, found), (nn.Sequential(*blocks), expected)):
        stack.zero_grad()
        torch.manual_seed(1)
        output = run(X)
        output.square().sum().backward()
        results += [output.detach(), *(p.grad.clone() for p in stack.blocks.parameters())]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_fixed_prev_is_exactly_plain_sequential_across_resolutions():
    blocks = conv_blocks()
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(mc.MaskedStack(blocks, connectivity="prev")(x), nn.Sequential(*blocks)(x))


def test_with_a_fan_in_of_all_candidates_there_is_nothing_to_learn():
    """Section 4.1: when K = C the mask is replaced by an addition of all branches."""
    layers = mlp_layers(3, 4)
    learned = mc.MaskedStack(layers, fan_in=4, aggregation="sum")
    assert torch.equal(learned(X), mc.MaskedStack(layers, connectivity="full", aggregation="sum")(X))


@pytest.mark.parametrize("fan_in", range(1, 8))
def test_the_fan_in_does_not_change_the_number_of_parameters(fan_in):
    """Section 4.1: all these models have the same capacity, as varying K does not affect the parameters."""
    stack = mc.MaskedStack(mlp_blocks(8), fan_in)
    assert sum(p.numel() for p in stack.blocks.parameters()) == 8 * (6 * 6 + 6)
    stack(X).sum().backward()
    assert all(p.grad is not None for p in stack.parameters())


def test_one_step_is_algorithm_1():
    """Normalize and write back; draw K distinct; forward and backward with m; m~ <- clip(m~ - eta dl/dm)."""
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2, aggregation="sum")
    with torch.no_grad():
        stack.masks.real.copy_(torch.rand(5, 5).tril())
    real_TS = stack.masks.real.detach().clone()
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3), momentum=0.9)
    mc.attach(optimizer, stack)

    outputs = {}
    for k, block in enumerate(stack.blocks):
        block.register_forward_hook(lambda _, inputs, y, k=k: outputs.update({k: (inputs[0], y)}))
    loss = F.mse_loss(stack(X), -X)
    inputs = [outputs[j][0] for j in range(1, 6)]
    for x_j in inputs:
        if x_j.requires_grad:  # one that does not feeds a module that nothing reads: dl/dx_j is zero
            x_j.retain_grad()
    loss.backward()
    optimizer.step()

    normal_TS = real_TS / real_TS.sum(dim=1, keepdim=True)
    assert stack.masks.binary.sum(dim=1).tolist() == [1, 2, 2, 2, 2]
    for t, x_j in enumerate(inputs):
        active = stack.masks.binary[t].nonzero().flatten().tolist()
        torch.testing.assert_close(x_j, sum(outputs[k][1] for k in active))
        for k in range(t + 1):
            slope = (x_j.grad * outputs[k][1]).sum() if x_j.requires_grad else 0.0
            expected = (normal_TS[t, k] - 0.3 * slope).clamp(0, 1)
            torch.testing.assert_close(stack.masks.real[t, k].detach(), expected)
    assert sum(x_j.requires_grad for x_j in inputs) >= 2, "this draw exercises the update"


def test_pruning_what_nothing_reads_would_not_change_the_function():
    """Section 3.2: the removal of unused modules does not affect the function computed by the network."""
    stack = mc.MaskedStack(mlp_blocks(8), 2, connectivity="random", seed=7)
    unread = [k for k, alive in enumerate(stack.masks.fixed.alive) if not alive]
    assert unread, "this seed leaves some module unread"
    before = stack(X)
    with torch.no_grad():
        for k in unread:
            for p in stack.blocks[k].parameters():
                p.fill_(float("nan"))
    assert torch.equal(stack(X), before)
