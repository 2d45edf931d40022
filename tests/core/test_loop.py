"""Masks in any training loop: groups, the mask update, several stacks."""

import copy

import pytest
import torch
from networks import mlp_blocks, mlp_layers, taken
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


def step_of_algorithm_1(real_TS, gradient_TS, rate):
    return (real_TS - rate * gradient_TS).clamp(0, 1)


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "SGD with Nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "Adam, fused": lambda groups: torch.optim.Adam(groups, fused=True),
    "Adam, maximising": lambda groups: torch.optim.Adam(groups, maximize=True),
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
    sign = -1 if "maximising" in name else 1
    for _ in range(4):
        stack(X).square().sum().backward()
        expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, sign * 0.3)
        weight = stack.blocks[5][0].weight.clone()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(stack.masks.real.detach(), expected)
        assert not torch.equal(stack.blocks[5][0].weight, weight)


def test_muon_takes_the_masks_with_its_matrices():
    blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(5)]
    stack = mc.MaskedStack(blocks, fan_in=2)
    optimizer = torch.optim.Muon(mc.param_groups(stack, lr=0.01, mask_lr=0.3))
    mc.attach(optimizer, stack)
    stack(X).square().sum().backward()
    expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, 0.3)
    optimizer.step()
    torch.testing.assert_close(stack.masks.real.detach(), expected)


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
        stack(X).square().sum().backward()
        expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, rate)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        torch.testing.assert_close(stack.masks.real.detach(), expected)


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


def test_masks_have_their_own_group_without_momentum_or_decay():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    weights, masks = mc.param_groups(stack, lr=0.1, mask_lr=0.3, weight_decay=1e-4)
    assert masks["params"] == [stack.masks.real]
    assert (masks["lr"], masks["weight_decay"], masks["momentum"]) == (0.3, 0.0, 0.0)
    assert {id(p) for p in weights["params"]} == {id(p) for p in stack.blocks.parameters()}


def test_a_fixed_network_goes_through_the_same_loop():
    stack = mc.MaskedStack(mlp_blocks(4), connectivity="prev")
    groups = mc.param_groups(stack, lr=0.1, mask_lr=0.3)
    assert len(groups) == 1
    optimizer = torch.optim.SGD(groups)
    mc.attach(optimizer, stack)
    stack(X).sum().backward()
    optimizer.step()
    mc.freeze(stack)
    assert mc.wiring_of(stack) == [[], [0], [1], [2]]


def test_after_the_freeze_the_same_optimizer_trains_the_weights_only():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    mc.attach(optimizer, stack)
    for frozen in (False, True):
        real, weight = stack.masks.real.detach().clone(), stack.blocks[3][0].weight.detach().clone()
        stack(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(stack.masks.real, real) == frozen
        assert not torch.equal(stack.blocks[3][0].weight, weight)
        mc.freeze(stack)


class Two(nn.Module):
    """A chain inside a module, then layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), mc.MaskedStack(mlp_blocks(4), fan_in=2))
        self.head = mc.MaskedStack(mlp_layers(2, 3), fan_in=2, seed=1)

    def forward(self, x):
        return self.head(self.body(x))


def test_several_stacks_inside_other_modules_are_found_learned_and_frozen_together():
    model = Two()
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.3))
    mc.attach(optimizer, model)
    before = [stack.masks.real.detach().clone() for stack in (model.body[1], model.head)]
    for _ in range(3):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stack, real in zip((model.body[1], model.head), before, strict=True):
        assert not torch.equal(stack.masks.real, real)
    wiring = mc.wiring_of(model)
    assert set(wiring) == {"body.1", "head"}
    mc.freeze(model)
    assert mc.wiring_of(model) == wiring
    assert wiring["head"] == mc.wiring_of(model.head)


def test_a_stack_inside_a_stack():
    inner = mc.MaskedStack(mlp_blocks(3), fan_in=1)
    outer = mc.MaskedStack([*mlp_blocks(2), inner, *mlp_blocks(1)], fan_in=4)
    outer(X).sum().backward()
    assert inner.masks.real.grad is not None
    assert set(mc.wiring_of(outer)) == {"", "blocks.2"}


def test_gradient_accumulation_adds_the_mask_gradients_of_every_draw():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    twin = copy.deepcopy(stack)
    gradients = []
    for x in (X, 2 * X, 3 * X):
        twin.zero_grad()
        twin(x).square().sum().backward()
        gradients.append(twin.masks.real.grad.clone())
        stack(x).square().sum().backward()
    torch.testing.assert_close(stack.masks.real.grad, sum(gradients))


@pytest.mark.parametrize("make", ["SGD with momentum", "Adam"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_that_is_saved_and_resumed_ends_as_one_that_was_not(make, frozen):
    def started():
        torch.manual_seed(0)
        stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
        return stack, OPTIMIZERS[make](mc.param_groups(stack, lr=0.01, mask_lr=0.3))

    def train(stack, optimizer):
        for _ in range(5):
            F.mse_loss(stack(X), -X).backward()
            optimizer.step()
            optimizer.zero_grad()

    stack, optimizer = started()
    mc.attach(optimizer, stack)
    train(stack, optimizer)
    if frozen:
        mc.freeze(stack)
    train(stack, optimizer)
    saved = copy.deepcopy((stack.state_dict(), optimizer.state_dict()))
    train(stack, optimizer)

    torch.manual_seed(1)
    again = mc.MaskedStack(mlp_blocks(6), fan_in=2, seed=7)
    again.load_state_dict(saved[0])
    resumed = OPTIMIZERS[make](mc.param_groups(again, lr=0.01, mask_lr=0.3))
    resumed.load_state_dict(saved[1])
    mc.attach(resumed, again)
    train(again, resumed)
    assert all(torch.equal(value, stack.state_dict()[key]) for key, value in again.state_dict().items())


def test_an_average_of_the_weights_follows_the_freeze():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=1)
    average = AveragedModel(stack, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        stack.masks.real.copy_(torch.rand(5, 5).tril())
    average.update_parameters(stack)
    mc.freeze(stack)
    average.update_parameters(stack)
    assert average.module.masks.is_frozen
    assert mc.wiring_of(average) == mc.wiring_of(stack)


def test_distributed_data_parallel_learns_and_is_wrapped_anew_after_the_freeze(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        stack = mc.MaskedStack(mlp_blocks(7), fan_in=1)
        model = DistributedDataParallel(stack)
        for _ in range(5):  # modules that nothing reads have gradients, so none is unused
            model(X).sum().backward()
        with pytest.raises(mc.ConfigError, match=r"call mc.freeze\(model.module\), then wrap it anew"):
            mc.freeze(model)
        mc.freeze(model.module)
        model = DistributedDataParallel(stack)
        for _ in range(3):
            model(X).sum().backward()
        assert mc.wiring_of(model) == mc.wiring_of(stack)
    finally:
        torch.distributed.destroy_process_group()


def test_two_forward_passes_may_be_in_flight():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    twin = copy.deepcopy(stack)
    (stack(X).square().sum() + stack(2 * X).square().sum()).backward()
    for x in (X, 2 * X):
        twin(x).square().sum().backward()
    for found, expected in zip(stack.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_the_same_seed_gives_the_same_training_to_the_bit():
    def train():
        torch.manual_seed(0)
        stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3), momentum=0.9)
        mc.attach(optimizer, stack)
        for _ in range(20):
            F.mse_loss(stack(X), -X).backward()
            optimizer.step()
            optimizer.zero_grad()
        return stack

    first, second = train(), train()
    assert taken(first, 3, X) == taken(second, 3, X)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_freeze_freezes_every_stack():
    model = Two()
    mc.freeze(model)
    assert model.body[1].masks.is_frozen
    assert model.head.masks.is_frozen


def test_the_groups_may_come_in_any_order():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.5, mask_lr=0.01)[::-1])
    mc.attach(optimizer, stack)
    stack(X).square().sum().backward()
    expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, 0.01)
    optimizer.step()
    torch.testing.assert_close(stack.masks.real.detach(), expected)


def test_an_optimizer_that_holds_the_masks_of_one_stack_of_two_is_refused():
    model = Two()
    with pytest.raises(mc.ConfigError, match="does not hold the masks"):
        mc.attach(torch.optim.SGD(mc.param_groups(model.head, lr=0.1, mask_lr=0.1)), model)


def test_momentum_of_the_masks_is_an_option_with_sgd():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    weights, masks = mc.param_groups(stack, lr=0.0, mask_lr=0.01)
    optimizer = torch.optim.SGD([weights, masks | {"momentum": 0.9}])
    mc.attach(optimizer, stack)
    stack(X).square().sum().backward()
    optimizer.step()
    expected = step_of_algorithm_1(stack.masks.real.detach(), 1.9 * stack.masks.real.grad, 0.01)
    optimizer.step()
    torch.testing.assert_close(stack.masks.real.detach(), expected)


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
    stack(X).square().sum().backward()
    expected = step_of_algorithm_1(stack.masks.real.detach(), stack.masks.real.grad, 0.01)
    optimizer.step()
    torch.testing.assert_close(stack.masks.real.detach(), expected)


def test_weights_that_the_user_froze_stay_out_of_the_groups():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    stack.blocks[0].requires_grad_(False)
    weights, _ = mc.param_groups(stack, lr=0.1, mask_lr=0.1)
    assert len(weights["params"]) == len(list(stack.blocks[1:].parameters()))
