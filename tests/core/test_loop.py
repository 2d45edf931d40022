"""Masks in any training loop: groups, several stacks, resuming, averages, several processes."""

import copy

import pytest
import torch
from networks import mlp_blocks, mlp_layers, taken
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import maskconnect as mc
from maskconnect.core.loop import EVEN, masks_of

X = torch.linspace(-1, 1, 18).reshape(3, 6)


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


@pytest.mark.parametrize("make", [lambda groups: torch.optim.SGD(groups, momentum=0.9), torch.optim.Adam])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_that_is_saved_and_resumed_ends_as_one_that_was_not(make, frozen):
    def train(stack, optimizer):
        for _ in range(5):
            F.mse_loss(stack(X), -X).backward()
            optimizer.step()
            optimizer.zero_grad()

    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = make(mc.param_groups(stack, lr=0.01, mask_lr=0.3))
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
    resumed = make(mc.param_groups(again, lr=0.01, mask_lr=0.3))
    resumed.load_state_dict(saved[1])
    mc.attach(resumed, again)
    train(again, resumed)
    assert all(torch.equal(value, stack.state_dict()[key]) for key, value in again.state_dict().items())


def learn(model, optimizer, steps):
    """So many steps; the temperature of each."""
    found = []
    for _ in range(steps):
        found.append(masks_of(model)[0].temperature)
        F.mse_loss(model(X), -X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_with_steps_masks_are_blended_and_cooled_until_the_last_reads_the_top_k_alone():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, steps=5)
    assert stack.masks.blend
    assert stack.masks.even == EVEN
    assert learn(stack, optimizer, 7) == [1, 0.75, 0.5, 0.25, 0, 0, 0]
    blended = stack(X)
    mc.freeze(stack)
    assert torch.equal(stack(X), blended)
    learn(stack, optimizer, 1)


def test_blended_masks_move_by_their_rate_unless_another_gradient_is_asked_for():
    def moved(gradient):
        stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=1e-3))
        mc.attach(optimizer, stack, gradient=gradient, steps=5)
        before = stack.masks.real.detach().clone()
        learn(stack, optimizer, 1)
        return (stack.masks.real.detach() - before).norm(dim=1)[1:]

    torch.testing.assert_close(moved(None), torch.full((4,), 1e-3), rtol=1e-3, atol=0)
    assert (moved("plain") < 0.5e-3).all()


def test_without_steps_masks_are_drawn_again_whatever_was_attached_before():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    for steps in (4, None):
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
        mc.attach(optimizer, stack, steps=steps)
        learn(stack, optimizer, 2)
    masks = stack.masks
    assert (masks.blend, masks.even, masks.temperature) == (False, 0, 1)


def test_masks_that_favour_the_old_wiring_are_not_spread():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2, mask_init=0.01)
    mc.attach(torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03)), stack, steps=4)
    assert stack.masks.blend
    assert stack.masks.even == 0


@pytest.mark.parametrize("even", [1, -0.1])
def test_a_part_to_spread_that_is_none_is_told(even):
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    stack.masks.blend, stack.masks.even = True, even
    with pytest.raises(mc.ConnectivityError, match="it must be at least 0 and below 1"):
        stack(X)


def test_one_step_is_enough_to_blend():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, steps=1)
    assert learn(stack, optimizer, 2) == [1, 0]


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("make", [lambda groups: torch.optim.SGD(groups, momentum=0.9), torch.optim.Adam])
def test_a_blended_run_goes_on_cooling_where_it_was_saved(make, attached_first):
    def made(seed):
        torch.manual_seed(seed)
        model = Two()
        return model, make(mc.param_groups(model, lr=0.01, mask_lr=0.3))

    model, optimizer = made(0)
    mc.attach(optimizer, model, steps=9)
    learn(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rest = learn(model, optimizer, 5)

    again, resumed = made(1)
    again.load_state_dict(saved[0])
    if attached_first:
        mc.attach(resumed, again, steps=9)
    resumed.load_state_dict(saved[1])
    if not attached_first:
        mc.attach(resumed, again, steps=9)
    assert learn(again, resumed, 5) == rest == [0.5, 0.375, 0.25, 0.125, 0]
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "9"])
def test_steps_that_are_no_count_are_told(steps):
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    with pytest.raises(mc.ConfigError, match="it must be how many optimizer steps"):
        mc.attach(optimizer, stack, steps=steps)


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


def test_an_optimizer_that_holds_the_masks_of_one_stack_of_two_is_refused():
    model = Two()
    with pytest.raises(mc.ConfigError, match="does not hold the masks"):
        mc.attach(torch.optim.SGD(mc.param_groups(model.head, lr=0.1, mask_lr=0.1)), model)


def test_weights_that_the_user_froze_stay_out_of_the_groups():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    stack.blocks[0].requires_grad_(False)
    weights, _ = mc.param_groups(stack, lr=0.1, mask_lr=0.1)
    assert len(weights["params"]) == len(list(stack.blocks[1:].parameters()))
