"""Step 3 of Algorithm 1, whatever the optimizer is: the masks take one clipped step of plain gradient descent."""

import copy

import pytest
import torch
from networks import mlp_blocks
from torch import nn

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


def step_of_algorithm_1(real_TS, gradient_TS, rate):
    return (real_TS - rate * gradient_TS).clamp(0, 1)


def assert_one_step_is_algorithm_1(stack, optimizer, rate):
    stack(X).square().sum().backward()
    expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, rate)
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(stack.masks.real.detach(), expected)


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "SGD with Nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "Adam, fused": lambda groups: torch.optim.Adam(groups, fused=True),
    "Adam, maximizing": lambda groups: torch.optim.Adam(groups, maximize=True),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_masks_by_plain_clipped_gradient_descent(name):
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = OPTIMIZERS[name](mc.param_groups(stack, lr=0.01, mask_lr=0.3, weight_decay=1e-2))
    mc.attach(optimizer, stack)
    sign = -1 if "maximizing" in name else 1
    for _ in range(4):
        weight = stack.blocks[5][0].weight.clone()
        assert_one_step_is_algorithm_1(stack, optimizer, sign * 0.3)
        assert not torch.equal(stack.blocks[5][0].weight, weight)


def test_muon_takes_the_masks_with_its_matrices():
    blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(5)]
    stack = mc.MaskedStack(blocks, fan_in=2)
    optimizer = torch.optim.Muon(mc.param_groups(stack, lr=0.01, mask_lr=0.3))
    mc.attach(optimizer, stack)
    assert_one_step_is_algorithm_1(stack, optimizer, 0.3)


def test_masks_can_have_an_optimizer_of_their_own_beside_one_that_takes_no_groups():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    weights, masks = mc.param_groups(stack, lr=0.5, mask_lr=0.3)
    lbfgs = torch.optim.LBFGS(weights["params"], lr=0.1, max_iter=1)
    sgd = torch.optim.SGD([masks])
    mc.attach(sgd, stack)

    def closure():
        lbfgs.zero_grad()
        loss = stack(X).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        lbfgs.step(closure)
        expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, 0.3)
        sgd.step()
        sgd.zero_grad()
        torch.testing.assert_close(stack.masks.real.detach(), expected)


def test_without_attach_a_step_that_leaves_the_interval_is_an_error_and_not_silent():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=5.0))
    stack(X).square().sum().backward()
    optimizer.step()
    with pytest.raises(mc.ConnectivityError, match=r"mc\.attach"):
        stack(X)


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", "RMSprop"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_gives_the_same_training_as_none(name, by_name):
    stacks = [mc.MaskedStack(mlp_blocks(6), fan_in=2)]
    stacks.append(copy.deepcopy(stacks[0]))
    for stack, with_closure in zip(stacks, (True, False), strict=True):
        optimizer = OPTIMIZERS[name](mc.param_groups(stack, lr=0.01, mask_lr=0.5))
        mc.attach(optimizer, stack)

        def closure(optimizer=optimizer, stack=stack):
            optimizer.zero_grad()
            loss = stack(X).square().sum()
            loss.backward()
            return loss

        for _ in range(10):
            if not with_closure:
                closure()
                optimizer.step()
            else:
                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
                assert loss > 0
    assert torch.equal(stacks[0].masks.real, stacks[1].masks.real)


def test_attaching_twice_is_attaching_once():
    stacks = [mc.MaskedStack(mlp_blocks(6), fan_in=2)]
    stacks.append(copy.deepcopy(stacks[0]))
    for stack, times in zip(stacks, (1, 2), strict=True):
        optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.01, mask_lr=0.3))
        for _ in range(times):
            mc.attach(optimizer, stack)
        stack(X).square().sum().backward()
        optimizer.step()
    assert torch.equal(stacks[0].masks.real, stacks[1].masks.real)


def test_a_scheduler_sets_the_mask_rate_too():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.01, mask_lr=0.4))
    mc.attach(optimizer, stack)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for rate in (0.4, 0.2, 0.1):
        assert_one_step_is_algorithm_1(stack, optimizer, rate)
        scheduler.step()


@pytest.mark.parametrize("make", ["SGD", "Adam", "Adam, fused"])
def test_a_gradient_scaler_changes_nothing_and_skips_masks_with_the_weights(make):
    stacks = [mc.MaskedStack(mlp_blocks(6), fan_in=2)]
    stacks.append(copy.deepcopy(stacks[0]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for stack, scaled in zip(stacks, (False, True), strict=True):
        optimizer = OPTIMIZERS[make](mc.param_groups(stack, lr=0.01, mask_lr=0.3))
        mc.attach(optimizer, stack)
        for _ in range(3):
            loss = stack(X).square().sum()
            if scaled:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(stacks[1].masks.real, stacks[0].masks.real)

    stack = stacks[1]
    loss = stack(X).square().sum() * float("inf")
    before = stack.masks.real.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(stack.masks.real.detach(), before)


def test_the_groups_may_come_in_any_order():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.5, mask_lr=0.01)[::-1])
    mc.attach(optimizer, stack)
    assert_one_step_is_algorithm_1(stack, optimizer, 0.01)


def test_sgd_of_all_parameters_gives_the_masks_neither_momentum_nor_decay():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    with pytest.warns(UserWarning, match="masks share the learning rate 0.01 of the weights"):
        mc.attach(optimizer, stack)
    for _ in range(3):
        assert_one_step_is_algorithm_1(stack, optimizer, 0.01)


def test_an_optimizer_may_overwrite_the_gradient():
    class Overwriting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(7).add_(1)
                    p.sub_(group["lr"] * p.grad)

    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    optimizer = Overwriting(mc.param_groups(stack, lr=0.1, mask_lr=0.01))
    mc.attach(optimizer, stack)
    for _ in range(2):
        assert_one_step_is_algorithm_1(stack, optimizer, 0.01)


def test_an_optimizer_derived_from_sgd_is_not_trusted_with_the_masks():
    class SignDescent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad.sign())

    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    optimizer = SignDescent(mc.param_groups(stack, lr=0.1, mask_lr=0.01))
    mc.attach(optimizer, stack)
    assert_one_step_is_algorithm_1(stack, optimizer, 0.01)


def stepped(gradient, rate=0.3):
    """The masks of a stack before and after one step, and the gradient by them."""
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=rate))
    mc.attach(optimizer, stack, mc.Draw(gradient=gradient))
    stack(X).square().sum().backward()
    before, grad = stack.masks.real.detach().clone(), stack.masks.real.grad.clone()
    optimizer.step()
    return before, grad, stack.masks.real.detach(), stack.masks.candidate_TS


def centered(grad, candidate):
    mean = torch.stack([row[on].mean() for row, on in zip(grad, candidate, strict=True)])
    return (grad - mean[:, None]) * candidate


def test_of_a_direction_the_rate_is_how_far_a_mask_goes():
    before, grad, after, candidate = stepped("direction", rate=1e-3)
    towards = -centered(grad, candidate)
    moved = towards.norm(dim=1) > 0  # not where there is one candidate, nor where nobody reads the target
    assert moved[-1]
    assert not moved[0]
    assert before[~moved].equal(after[~moved])
    torch.testing.assert_close((after - before)[moved].norm(dim=1), torch.full((int(moved.sum()),), 1e-3))
    cosine = torch.nn.functional.cosine_similarity((after - before)[moved], towards[moved], dim=1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=1e-3, atol=0)


def test_with_gradient_none_masks_stay_where_they_are():
    before, grad, after, _ = stepped("none")
    assert grad.any()
    assert torch.equal(after, before)


def test_where_gradients_of_all_candidates_are_equal_a_direction_is_none():
    stack = mc.MaskedStack([nn.Identity() for _ in range(4)], 2)
    stack.masks.real.data[-1] = torch.tensor([0.5, 0.3, 0.2])
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.0, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Draw(gradient="direction"))
    for _ in range(20):
        stack(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(stack.masks.real[-1].detach(), torch.tensor([0.5, 0.3, 0.2]))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_with_a_fused_optimizer_and_a_scaler_a_direction_is_as_long_as_without(make):
    found = []
    for scale in (1.0, 65536.0):
        torch.manual_seed(0)
        stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
        optimizer = make(mc.param_groups(stack, lr=0.01, mask_lr=0.03), fused=True)
        mc.attach(optimizer, stack, mc.Blend(steps=5))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            scaler.scale(stack(X).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(stack.masks.real.detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
