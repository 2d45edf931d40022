"""Real masks, draws, the freeze, and what of them is in the state_dict."""

import copy
import io
import json
import pickle

import pytest
import torch
from networks import mlp_blocks, mlp_layers, taken
from torch import nn

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


def learned(seed=0, fan_in=2, count=6):
    return mc.MaskedStack(mlp_blocks(count), fan_in, seed=seed)


def biased(stack):
    """A stack whose masks are as after some learning: uneven, a few of them zero."""
    with torch.no_grad():
        stack.masks.real.copy_(torch.rand_like(stack.masks.real).sub_(0.2).clamp_(0) * (stack.masks.source >= 0))
    return stack


def test_real_masks_are_parameters_and_start_equal():
    stack = learned()
    assert "masks.real" in dict(stack.named_parameters())
    torch.testing.assert_close(stack.masks.real[3], torch.tensor([0.25] * 4 + [0.0]))


def test_masks_may_start_larger_where_a_source_is_nearer():
    stack = mc.MaskedStack(mlp_blocks(4), 2, mask_init=0.1)
    rows = torch.tensor([[1, 0, 0], [0.1, 1, 0], [0.01, 0.1, 1]])
    torch.testing.assert_close(stack.masks.real.detach(), rows / rows.sum(dim=1, keepdim=True))
    layered = mc.MaskedStack(mlp_layers(2, 3), 2, mask_init=0.5)  # the own branch, then cyclic, as ties in the top-K
    rows = torch.tensor([[1, 0.5, 0.25], [0.25, 1, 0.5], [0.5, 0.25, 1]])
    torch.testing.assert_close(layered.masks.real.detach(), rows / 1.75)
    assert torch.equal(mc.MaskedStack(mlp_blocks(4), 2, mask_init=1.0).masks.real, learned(count=4).masks.real)


def test_a_start_so_near_that_far_entries_are_zero_still_draws_and_learns():
    stack = mc.MaskedStack(mlp_blocks(40), 30, mask_init=1e-6)
    assert (stack.masks.real == 0).any()
    for mask in taken(stack, 3, X):
        assert [sum(row) for row in mask] == [min(30, j) for j in range(1, 40)]
    stack(X).sum().backward()
    assert (stack.masks.real.grad != 0).sum() > 700


@pytest.mark.parametrize("start", ["unifrom", 0, -0.1, 1.1, float("nan"), True, None, [0.5]])
def test_a_start_that_cannot_be_meant_is_an_error(start):
    with pytest.raises(mc.ConfigError, match=r"mask_init is .*; it must be 'uniform', or a number above 0 and up to 1"):
        mc.MaskedStack(mlp_blocks(4), 2, mask_init=start)


def test_train_mode_draws_again_and_eval_mode_uses_the_top_k():
    stack = biased(learned())
    assert len(set(map(str, taken(stack, 10, X)))) > 5
    stack.eval()
    wiring = mc.wiring_of(stack)
    for target, row in enumerate(wiring[1:]):
        real = stack.masks.real[target, : target + 1]
        assert set(row) == set(real.topk(min(2, target + 1)).indices.tolist())
    assert torch.equal(stack(X), stack(X))


def test_every_draw_has_exactly_k_sources_a_target_or_all_where_there_are_fewer():
    stack = learned(fan_in=3)
    for mask in taken(stack, 20, X):
        assert [sum(row) for row in mask] == [1, 2, 3, 3, 3]


def test_a_fan_in_for_each_target():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=[1, 1, 3, 9])
    stack(X)
    assert stack.masks.binary.sum(dim=1).tolist() == [1, 1, 3, 4]


def test_a_draw_writes_the_normalized_real_masks_back():
    stack = biased(learned())
    stack(X)
    torch.testing.assert_close(stack.masks.real.sum(dim=1), torch.ones(5))
    assert not stack.masks.real[stack.masks.source < 0].any()


def test_eval_mode_changes_nothing():
    stack = biased(learned()).eval()
    before = copy.deepcopy(stack.state_dict())
    stack(X)
    assert all(torch.equal(value, before[key]) for key, value in stack.state_dict().items())


def test_with_equal_masks_the_top_k_are_the_nearest_sources_or_the_own_branch_and_then_cyclic():
    assert mc.wiring_of(learned()) == [[], [0], [0, 1], [1, 2], [2, 3], [3, 4]]
    layered = mc.MaskedStack(mlp_layers(2, 4), fan_in=2)
    assert mc.wiring_of(layered)[1] == [[0, 1], [1, 2], [2, 3], [0, 3]]


def test_freeze_fixes_the_top_k_and_the_gradient_of_the_masks_is_zero_from_then_on():
    stack = biased(learned())
    stack(X).sum().backward()
    wiring = mc.wiring_of(stack)
    mc.freeze(stack)
    assert mc.wiring_of(stack) == wiring
    assert stack.masks.real.grad is None
    stack.train()
    output = stack(X)
    output.sum().backward()
    assert not stack.masks.real.grad.any()
    assert torch.equal(output, stack.eval()(X))


def test_freezing_twice_changes_nothing():
    stack = biased(learned())
    mc.freeze(stack)
    wiring = mc.wiring_of(stack)
    with torch.no_grad():
        stack.masks.real.zero_()
    mc.freeze(stack)
    assert mc.wiring_of(stack) == wiring


@pytest.mark.parametrize("modules", [lambda: mlp_blocks(6), lambda: mlp_layers(3, 4)])
def test_the_wiring_is_plain_data_that_a_new_network_takes(modules):
    first = biased(mc.MaskedStack(modules(), fan_in=2))
    wiring = json.loads(json.dumps(mc.wiring_of(first)))
    second = mc.MaskedStack(modules(), connectivity=wiring)
    second.blocks.load_state_dict(first.blocks.state_dict())
    assert mc.wiring_of(second) == wiring
    assert torch.equal(first.eval()(X), second(X))


def test_frozen_flag_wiring_and_generator_are_in_the_state_dict():
    assert {"masks.frozen", "masks.binary", "masks._extra_state"} <= set(learned().state_dict())
    assert all(isinstance(value, torch.Tensor) for value in learned().state_dict().values())


@pytest.mark.parametrize("through", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_continues_the_same_sequence_of_draws(through):
    stack = learned()
    taken(stack, 3, X)
    twin = through(stack)
    assert taken(stack, 5, X) == taken(twin, 5, X)


def test_a_restored_stack_continues_the_same_sequence_of_draws_even_from_a_file():
    stack = biased(learned(seed=4))
    taken(stack, 3, X)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    other = learned(seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.masks.real, stack.masks.real)
    assert taken(stack, 5, X) == taken(other, 5, X)


def test_a_restored_frozen_stack_is_frozen_with_the_same_wiring_and_a_restored_learning_one_learns():
    learning = biased(learned())
    frozen = copy.deepcopy(learning)
    mc.freeze(frozen)
    other = learned(seed=1)
    other.load_state_dict(frozen.state_dict())
    assert other.masks.is_frozen
    assert mc.wiring_of(other) == mc.wiring_of(frozen)
    assert torch.equal(other(X), frozen(X))
    other.load_state_dict(learning.state_dict())
    assert not other.masks.is_frozen
    assert other.masks.real.requires_grad


def test_the_state_of_another_fan_in_or_other_candidates_is_refused():
    state = learned(fan_in=2).state_dict()
    with pytest.raises(mc.CheckpointError, match="another fan-in"):
        learned(fan_in=3).load_state_dict(state)
    narrow = mc.MaskedStack(mlp_blocks(6), 2, wiring=[[], [0], [0, 1], [1, 2], [2, 3], [3, 4]])
    with pytest.raises(mc.CheckpointError, match="other candidate sources"):
        narrow.load_state_dict(state)


@pytest.mark.parametrize("damage", ["no source at all", "a source that is none"])
def test_a_frozen_wiring_that_is_none_is_an_error(damage):
    stack = learned(fan_in=1)
    mc.freeze(stack)
    state = copy.deepcopy(stack.state_dict())
    state["masks.binary"][0] = False
    state["masks.binary"][0, 4] = damage == "a source that is none"  # the first target has one candidate, column 0
    with pytest.raises(mc.ConnectivityError, match="saved state is damaged, or buffers were averaged"):
        stack.load_state_dict(state)


def test_neither_dropout_nor_data_order_nor_another_stack_changes_the_draws():
    alone = taken(learned(seed=2), 6, X)

    noisy = learned(seed=2)
    noisy.blocks[0].append(nn.Dropout(0.5))
    neighbor = learned(seed=2)
    found = []
    for _ in range(6):
        torch.randperm(10)
        neighbor(X)
        found += taken(noisy, 1, X)
    assert found == alone


def test_another_seed_draws_other_masks():
    assert taken(learned(seed=0), 5, X) != taken(learned(seed=1), 5, X)


def test_drawing_leaves_the_global_generator_alone():
    stack = learned()
    before = torch.get_rng_state()
    stack.masks.draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mask_that_is_not_finite_names_its_target_and_source():
    stack = learned()
    with torch.no_grad():
        stack.masks.real[3, 1] = float("nan")
    says = r"real mask of module 4 at module 1 is nan.*not finite in an earlier step"
    with pytest.raises(mc.ConnectivityError, match=says):
        stack(X)


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_a_mask_outside_its_interval_points_to_attach(value):
    stack = learned()
    with torch.no_grad():
        stack.masks.real[3, 1] = value
    with pytest.raises(mc.ConnectivityError, match=rf"is {value}, outside \[0, 1\]. Call mc.attach"):
        stack(X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_never_fall_below_float32(dtype):
    stack = biased(learned())
    real = stack.masks.real.clone()
    stack.to(dtype)
    assert stack.blocks[0][0].weight.dtype == dtype
    assert torch.equal(stack.masks.real, real)
    assert stack.double().masks.real.dtype == torch.float64


def test_a_stack_moves_with_to():
    stack = learned().to("meta")
    assert all(tensor.is_meta for tensor in (*stack.parameters(), *stack.buffers()))


def test_print_says_what_the_masks_do():
    stack = learned()
    assert "5 targets, 15 candidate connections, learning" in repr(stack)
    mc.freeze(stack)
    assert "frozen" in repr(stack)


@pytest.mark.parametrize("assign", [True, False])
def test_every_load_of_a_frozen_wiring_counts(assign):
    stack = learned(fan_in=1)
    for _ in range(3):
        saved = biased(learned(fan_in=1))
        mc.freeze(saved)
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        stack.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert mc.wiring_of(stack) == mc.wiring_of(saved)


def test_a_frozen_wiring_follows_its_buffer():
    stack = mc.MaskedStack(mlp_blocks(4), connectivity="prev")
    assert mc.wiring_of(stack) == [[], [0], [1], [2]]
    stack.masks.binary.copy_(mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [0], [0]]).masks.binary)
    assert mc.wiring_of(stack) == [[], [0], [0], [0]]


def test_masks_of_fixed_connectivity_are_those_of_a_network_that_is_sure():
    assert mc.MaskedStack(mlp_blocks(3), connectivity="prev").masks.real.tolist() == [[1, 0], [0, 1]]


def test_masks_begin_in_float64_where_that_is_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        assert learned().masks.real.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_module_alone_has_no_masks_to_train():
    assert len(mc.param_groups(learned(count=1), lr=0.1, mask_lr=0.1)) == 1


def test_at_temperature_zero_a_draw_is_the_top_k_with_a_gradient_for_every_candidate():
    stack = biased(learned())
    stack.masks.learn_by(mc.Draw(temperature=0.0))
    stack.train()(X).sum().backward()
    assert torch.equal(stack.masks.binary, stack.masks.top().mask_TS)
    last = stack.masks.real.grad[-1]  # of the module whose output is that of the stack
    assert (last != 0).all()
    assert stack.masks.binary[-1].sum() == 2


def test_the_steps_taken_are_those_of_the_buffer_however_it_changes():
    masks = mc.MaskedStack(mlp_blocks(4), 2).masks
    for steps in range(20):  # a new tensor may lie where an old one was
        masks.progress = torch.tensor(steps)
        assert masks.steps_taken == steps
        masks.count_step()
        assert masks.steps_taken == steps + 1 == int(masks.progress)
        masks.progress.fill_(7)
        assert masks.steps_taken == 7


def trained(stack, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        stack(X).square().sum().backward()
        optimizer.step()
    return stack


def blending():
    stack = learned()
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.001, mask_lr=0.01))
    mc.attach(optimizer, stack, mc.Blend(steps=100))
    return stack, optimizer


def test_a_copy_that_loads_a_state_knows_its_steps():
    late = trained(*blending(), steps=90).state_dict()
    twin = copy.deepcopy(trained(*blending(), steps=2))
    twin.load_state_dict(late)
    assert twin.masks.steps_taken == int(twin.masks.progress) == 90


def test_an_average_of_a_stack_is_frozen_with_it():
    stack = learned()
    stack.load_state_dict(stack.state_dict())
    average = torch.optim.swa_utils.AveragedModel(stack)
    mc.freeze(stack)
    average.update_parameters(stack)
    assert average.module.masks.is_frozen
