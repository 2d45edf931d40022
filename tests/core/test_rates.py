"""The learning rate of the masks under schedulers, and in an optimizer that somebody else has made."""

import warnings

import pytest
import torch
from networks import mlp_blocks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)
REPLACED = r"replaced mask_lr=0.3 by .*, the learning rate of the weights\. .* max_lr=\[lr, mask_lr\]"


def steps(optimizer, stack, scheduler, count=4):
    for _ in range(count):
        stack(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def learning(make=SGD, lr=0.1, mask_lr=0.3, **kwargs):
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    optimizer = make(mc.param_groups(stack, lr=lr, mask_lr=mask_lr), **kwargs)
    mc.attach(optimizer, stack)
    return optimizer, stack


@pytest.mark.parametrize(
    "scheduled",
    [
        pytest.param(lambda o: OneCycleLR(o, max_lr=0.1, total_steps=9), id="one cycle"),
        pytest.param(lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3), id="cyclic"),
    ],
)
def test_one_rate_for_all_groups_is_a_warning_that_says_what_to_pass(scheduled):
    optimizer, stack = learning(momentum=0.9)
    with pytest.warns(UserWarning, match=REPLACED) as told:
        steps(optimizer, stack, scheduled(optimizer))
    assert len(told) == 1


@pytest.mark.parametrize(
    "scheduled",
    [
        pytest.param(lambda o: OneCycleLR(o, max_lr=[0.1, 0.3], total_steps=9), id="one cycle"),
        pytest.param(lambda o: CyclicLR(o, base_lr=0.01, max_lr=[0.1, 0.3], step_size_up=3), id="cyclic"),
        pytest.param(lambda o: LambdaLR(o, lambda step: step / 9), id="warm-up"),
        pytest.param(lambda o: CosineAnnealingLR(o, 9), id="cosine"),
    ],
)
def test_one_rate_per_group_does_not_warn(scheduled):
    optimizer, stack = learning(momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer, stack, scheduled(optimizer))


def test_rates_that_were_given_as_equal_may_stay_so():
    optimizer, stack = learning(momentum=0.9, mask_lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer, stack, CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3))


def test_a_loop_that_sets_the_rates_itself_may_make_them_equal():
    optimizer, stack = learning()
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            stack(X).square().sum().backward()
            optimizer.step()


def twins(make):
    """A stack whose optimizer has a group for the masks, and one whose optimizer holds everything in one group."""
    grouped, alone = (mc.MaskedStack(mlp_blocks(4), fan_in=1) for _ in range(2))
    alone.load_state_dict(grouped.state_dict())
    first = make(mc.param_groups(grouped, lr=0.01, mask_lr=0.3), lr=0.01)
    second = make(alone.parameters(), lr=0.01)
    mc.attach(first, grouped, mc.Blend(steps=6))
    mc.attach(second, alone, mc.Blend(steps=6), mask_lr=0.3)
    return (first, grouped), (second, alone)


@pytest.mark.parametrize("make", [SGD, lambda p, lr: AdamW(p, lr=lr, weight_decay=0.0)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize(
    "factor",
    [lambda step: (step + 1) / 9, lambda step: 1 - step / 9, lambda step: 0.5**step],
    ids=["up", "down", "half"],
)
def test_in_a_group_of_weights_masks_follow_its_schedule_from_their_own_rate(make, factor):
    pairs = twins(make)
    for optimizer, stack in pairs:
        steps(optimizer, stack, LambdaLR(optimizer, factor))
    (_, grouped), (_, alone) = pairs
    torch.testing.assert_close(alone.masks.real, grouped.masks.real)
    torch.testing.assert_close(alone.blocks[3][0].weight, grouped.blocks[3][0].weight)
    assert not torch.equal(grouped.masks.real, mc.MaskedStack(mlp_blocks(4), fan_in=1).masks.real)


def test_one_cycle_brings_masks_in_a_group_of_weights_up_to_their_rate():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    optimizer = SGD(stack.parameters(), lr=0.01)
    mc.attach(optimizer, stack, mc.Blend(steps=9), mask_lr=0.3)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=9, cycle_momentum=False)
    lengths, rates = [], []
    for _ in range(8):
        stack(X).square().sum().backward()
        before = stack.masks.real.detach().clone()
        rates.append(0.3 * optimizer.param_groups[0]["lr"] / 0.2)
        optimizer.step()
        lengths.append((stack.masks.real - before)[2].norm().item())  # a direction has length 1, except for the clip
        scheduler.step()
    assert max(rates) == pytest.approx(0.3, rel=0.1)
    assert all(length <= rate + 1e-6 for length, rate in zip(lengths, rates, strict=True))
    assert lengths[0] == pytest.approx(rates[0], rel=1e-4)


def test_without_a_schedule_the_rate_is_the_given_one_even_beside_frozen_weights():
    for lr in (0.05, 0.0):
        stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
        optimizer = SGD(stack.parameters(), lr=lr)
        mc.attach(optimizer, stack, mc.Blend(steps=9), mask_lr=0.01)
        stack(X).square().sum().backward()
        before = stack.masks.real.detach().clone()
        optimizer.step()
        assert (stack.masks.real - before)[2].norm().item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("parts", [False, True], ids=["one group", "a group per module"])
def test_masks_that_share_the_rate_of_the_weights_are_a_warning_that_says_what_to_pass(parts):
    model = nn.Sequential(nn.Linear(6, 6), mc.MaskedStack(mlp_blocks(4), fan_in=1))
    groups = [{"params": part.parameters()} for part in model] if parts else model.parameters()
    shared = (
        r"masks share the learning rate 0.001 of the weights; .* mc\.param_groups\(.*, or pass mask_lr to mc\.attach"
    )
    with pytest.warns(UserWarning, match=shared) as told:
        mc.attach(AdamW(groups, lr=1e-3), model, mc.Blend(steps=9))
    assert len(told) == 1
    assert told[0].filename == __file__


def test_masks_without_weights_that_learn_beside_them_share_no_rate():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    mc.attach(SGD(stack.parameters(), lr=0.1), stack, mask_lr=0.1)
    mc.attach(SGD(stack.masks.parameters(), lr=0.1), stack)
    mc.attach(SGD(stack.parameters(), lr=0.1), stack, mc.Draw(gradient="none"))
    stack.blocks.requires_grad_(False)
    mc.attach(SGD(stack.parameters(), lr=0.1), stack)
    stack.blocks.requires_grad_(True)
    mc.freeze(stack)
    mc.attach(SGD(stack.parameters(), lr=0.1), stack)


@pytest.mark.parametrize("rate", [-1, float("nan"), "fast"])
def test_an_invalid_rate_is_an_error(rate):
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)
    with pytest.raises(mc.ConfigError, match="mask_lr"):
        mc.attach(SGD(stack.parameters(), lr=0.1), stack, mask_lr=rate)


def test_a_step_without_rate_and_gradient_is_not_counted():
    """As torch.distributed.checkpoint makes one, to set up the state of an optimizer."""
    optimizer, stack = learning()
    assert get_optimizer_state_dict(stack, optimizer)["param_groups"]
    assert stack.masks.steps_taken == 0
    LambdaLR(optimizer, lambda step: 0)
    stack(X).square().sum().backward()
    optimizer.step()
    assert stack.masks.steps_taken == 1  # the first step of a warm-up is one


def test_the_saved_state_has_the_same_size_however_masks_learn():
    sizes = set()
    for how in (mc.Draw(), mc.Blend(steps=1), mc.Blend(steps=10**9, uniform_floor=0.123456789, credit="new")):
        optimizer, stack = learning()
        mc.attach(optimizer, stack, how)
        saved = stack.masks.get_extra_state()
        again = mc.MaskedStack(mlp_blocks(4), fan_in=1)
        again.masks.set_extra_state(saved)
        assert again.masks.how == how
        sizes.add(len(saved))
    assert len(sizes) == 1
