"""Equation 1, backwards: what the masks and the weights receive."""

import pytest
import torch
from networks import (
    chain_by_hand,
    conv_blocks,
    layers_by_hand,
    mlp_blocks,
    mlp_layers,
    relaxed_chain,
    relaxed_layers,
)
from torch import nn

import maskconnect as mc


def finite_differences(function, mask_TS, candidate_TS, step=1e-6):
    gradient_TS = torch.zeros_like(mask_TS)
    for t, s in candidate_TS.nonzero().tolist():
        up, down = mask_TS.clone(), mask_TS.clone()
        up[t, s] += step
        down[t, s] -= step
        gradient_TS[t, s] = (function(up) - function(down)) / (2 * step)
    return gradient_TS


def squared(x):
    return x.square().sum()


def mean_of_the_users_own(sources, mask):
    return torch.einsum("s,s...->...", mask, torch.stack(sources)) / mask.sum().detach()


CHAINS = {
    "mlp": (lambda: mlp_blocks(6), (7, 6)),
    "conv with three resolutions": (conv_blocks, (2, 4, 8, 8)),
}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("aggregation", ["mean", "sum", mean_of_the_users_own])
@pytest.mark.parametrize("fan_in", [1, 3])
def test_mask_gradients_of_a_chain_equal_finite_differences_of_the_relaxed_aggregation(kind, aggregation, fan_in):
    make, shape = CHAINS[kind]
    stack = mc.MaskedStack(make(), fan_in, aggregation=aggregation).double()
    x = torch.randn(shape, dtype=torch.float64)
    squared(stack(x)).backward()
    mask_TS = stack.masks.binary.double()
    power = {"sum": 0}.get(aggregation, 1)
    divisors = [min(fan_in, t + 1) ** power for t in range(5)]
    candidate_TS = torch.ones(5, 5).tril().bool()
    with torch.no_grad():
        expected_TS = finite_differences(
            lambda m: squared(relaxed_chain(stack.flat(), m, divisors, x)), mask_TS, candidate_TS
        )
    torch.testing.assert_close(stack.masks.real.grad, expected_TS, rtol=1e-6, atol=1e-8)
    inactive_TS = candidate_TS & ~stack.masks.binary
    assert stack.masks.real.grad[inactive_TS].abs().max() > 0


@pytest.mark.parametrize("aggregation", ["mean", "sum", mean_of_the_users_own])
def test_mask_gradients_of_layers_equal_finite_differences_of_the_relaxed_aggregation(aggregation):
    stack = mc.MaskedStack(mlp_layers(3, 4), fan_in=2, aggregation=aggregation).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    squared(stack(x)).backward()
    divisors = [1 if aggregation == "sum" else 2] * 8
    with torch.no_grad():
        expected_TS = finite_differences(
            lambda m: squared(relaxed_layers(stack.blocks, m, divisors, x, mean=aggregation != "sum")),
            stack.masks.binary.double(),
            torch.ones(8, 4).bool(),
        )
    torch.testing.assert_close(stack.masks.real.grad, expected_TS, rtol=1e-6, atol=1e-8)


def weights_and_gradients(stack, output):
    weights = {name: p for name, p in stack.named_parameters() if name != "masks.real"}
    return dict(zip(weights, torch.autograd.grad(squared(output), weights.values(), allow_unused=True), strict=True))


@pytest.mark.parametrize("aggregation", ["mean", "sum", mean_of_the_users_own])
@pytest.mark.parametrize("phase", ["learning", "evaluating", "frozen"])
@pytest.mark.parametrize("kind", [*CHAINS, "layers"])
def test_outputs_and_weight_gradients_equal_the_network_written_by_hand(kind, phase, aggregation):
    make, shape = CHAINS.get(kind, (lambda: mlp_layers(3, 4), (7, 6)))
    stack = mc.MaskedStack(make(), fan_in=2, aggregation=aggregation, seed=3).double()
    x = torch.randn(shape, dtype=torch.float64)
    if phase == "frozen":
        mc.freeze(stack)
    stack.train(phase != "evaluating")
    output = stack(x)
    wiring = mc.wiring_of(stack) if phase != "learning" else wiring_of_last_draw(stack)
    by_hand = layers_by_hand if kind == "layers" else chain_by_hand
    expected = by_hand(stack.blocks, wiring, x, mean=aggregation != "sum")
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found, wanted = weights_and_gradients(stack, output), weights_and_gradients(stack, expected)
    for name in found:
        gradient = torch.zeros_like(found[name]) if wanted[name] is None else wanted[name]
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def wiring_of_last_draw(stack):
    masks = stack.masks
    sources = [()] * masks.layout.targets.start
    for row, candidates in zip(masks.binary, masks.source, strict=True):
        sources.append(tuple(candidates[row].tolist()))
    return masks.layout.to_plain(tuple(sources))


def test_a_frozen_network_computes_what_the_same_draw_computed_while_learning():
    stack = mc.MaskedStack(mlp_blocks(8), fan_in=3)
    x = torch.randn(5, 6)
    learned = stack(x)
    fixed = mc.MaskedStack(stack.flat(), connectivity=wiring_of_last_draw(stack))(x)
    assert torch.equal(learned, fixed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_inactive_source_reaches_neither_the_output_nor_a_weight(value):
    class Poison(nn.Module):
        def forward(self, x):
            return torch.full_like(x, value)

    blocks = [*mlp_blocks(2), Poison(), *mlp_blocks(2)]
    stack = mc.MaskedStack(blocks, fan_in=1)
    x = torch.randn(3, 6)
    for _ in range(20):
        output = stack(x)
        if not stack.masks.binary[:, 2].any():
            break
    output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for name, p in stack.named_parameters() if name != "masks.real")
    assert not stack.masks.real.grad[3, 2].isfinite()  # what the mask learned of that source is not hidden


def test_an_inactive_source_receives_no_gradient_through_the_aggregate():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append(self))
            return y

    blocks = [Watched(4, 4) for _ in range(6)]
    stack = mc.MaskedStack(blocks, fan_in=1, seed=1)
    stack(torch.randn(3, 4)).sum().backward()
    active = {k for row in wiring_of_last_draw(stack) for k in row}
    assert active < set(range(5)), "this seed leaves some module unread"
    read = {i for i, block in enumerate(blocks) if any(block is found for found in seen)}
    assert read <= active | {5}


@pytest.mark.parametrize("phase", ["learning", "evaluating", "frozen", "random", "own aggregation"])
@pytest.mark.parametrize("make", [lambda: mlp_blocks(7), lambda: mlp_layers(4, 4)])
def test_a_module_that_nothing_reads_has_a_gradient_of_zero_and_not_none(phase, make):
    aggregation = mean_of_the_users_own if phase == "own aggregation" else "mean"
    connectivity = "random" if phase == "random" else "learned"
    stack = mc.MaskedStack(make(), fan_in=1, connectivity=connectivity, aggregation=aggregation, seed=5)
    with torch.no_grad():
        stack.masks.real.copy_(torch.rand_like(stack.masks.real) * (stack.masks.source >= 0))
    if phase == "frozen":
        mc.freeze(stack)
    stack.train(phase != "evaluating")
    for _ in range(2):  # the second pass skips what it need not run, and must not differ
        stack.zero_grad()
        stack(torch.randn(3, 6)).sum().backward()
        gradients = [p.grad for p in stack.blocks.parameters()]
        assert all(gradient is not None for gradient in gradients)
        assert any(not gradient.any() for gradient in gradients), "some module is unread"


def test_momentum_and_decay_act_on_an_unread_module_as_on_any_other():
    stack = mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [1], [0]])
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.1, weight_decay=0.5))
    before = stack.blocks[2][0].weight.clone()
    stack(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(stack.blocks[2][0].weight, before * (1 - 0.1 * 0.5))


def test_gradients_of_half_precision_masks_are_added_up_in_float32():
    stack = mc.MaskedStack([nn.Identity(), nn.Identity()], fan_in=1).to(torch.float16)
    x = torch.full((4096, 8), 2.0, dtype=torch.float16, requires_grad=True)
    stack(x).backward(torch.full_like(x, 2.0))
    assert stack.masks.real.grad.item() == 4096 * 8 * 4  # beyond 65504, the largest float16


def test_a_mean_in_half_precision_does_not_overflow():
    stack = mc.MaskedStack([nn.Identity() for _ in range(5)], connectivity="full")
    x = torch.full((3,), 40_000.0, dtype=torch.float16)
    assert torch.equal(stack(x), x)


def test_mask_gradients_of_complex_outputs_are_real():
    class Turn(nn.Module):
        def __init__(self, angle):
            super().__init__()
            self.turn = torch.polar(torch.tensor(1.0, dtype=torch.float64), torch.tensor(angle, dtype=torch.float64))

        def forward(self, x):
            return x * self.turn

    stack = mc.MaskedStack([Turn(0.3), Turn(0.7), Turn(1.1)], 1, aggregation="sum").double()
    x = torch.randn(4, dtype=torch.complex128)
    weights = torch.randn(4, dtype=torch.float64)
    (stack(x).real * weights).sum().backward()
    with torch.no_grad():
        expected = finite_differences(
            lambda m: (relaxed_chain(stack.flat(), m, [1, 1], x).real * weights).sum(),
            stack.masks.binary.double(),
            torch.ones(2, 2).tril().bool(),
        )
    torch.testing.assert_close(stack.masks.real.grad, expected, rtol=1e-6, atol=1e-8)


def test_masks_that_need_no_gradient_get_none():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    stack.masks.real.requires_grad_(False)
    stack(torch.randn(3, 6)).sum().backward()
    assert stack.masks.real.grad is None
    assert all(p.grad is not None for p in stack.blocks.parameters())
