"""Masks in any training loop: groups, several stacks, resuming, averages, several processes."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from networks import blending, mlp_blocks, mlp_layers, taken
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import maskconnect as mc
from maskconnect.core.lookup import masks_of

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
    outer = mc.MaskedStack([*mlp_blocks(2), inner, *mlp_blocks(1)], fan_in=3)
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
    """Take this number of steps, and return the temperature of each."""
    found = []
    for _ in range(steps):
        masks = masks_of(model)[0]
        found.append(masks.how.temperature_after(masks.steps_taken))
        F.mse_loss(model(X), -X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_with_steps_masks_are_blended_and_cooled_until_the_last_reads_the_top_k_alone():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Blend(steps=5))
    assert learn(stack, optimizer, 7) == [1, 0.75, 0.5, 0.25, 0, 0, 0]
    blended = stack(X)
    mc.freeze(stack)
    assert torch.equal(stack(X), blended)
    learn(stack, optimizer, 1)


def test_blended_masks_move_by_their_rate_unless_another_gradient_is_asked_for():
    def moved(gradient):
        stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=1e-3))
        mc.attach(optimizer, stack, mc.Blend(steps=5, gradient=gradient))
        before = stack.masks.real.detach().clone()
        learn(stack, optimizer, 1)
        return (stack.masks.real.detach() - before).norm(dim=1)[1:]

    torch.testing.assert_close(moved("direction"), torch.full((4,), 1e-3), rtol=1e-3, atol=0)
    assert (moved("plain") < 0.5e-3).all()


@pytest.mark.parametrize("same_optimizer", [False, True])
def test_attaching_again_replaces_what_was_attached_before(same_optimizer):
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    twin = copy.deepcopy(stack)
    groups = mc.param_groups(stack, lr=0.0, mask_lr=0.03)
    optimizer = torch.optim.SGD(groups)
    mc.attach(optimizer, stack, mc.Blend(steps=9))
    if not same_optimizer:
        optimizer = torch.optim.SGD(groups)
    mc.attach(optimizer, stack)
    alone = torch.optim.SGD(mc.param_groups(twin, lr=0.0, mask_lr=0.03))
    mc.attach(alone, twin)
    assert learn(stack, optimizer, 3) == learn(twin, alone, 3) == [1, 1, 1]
    assert torch.equal(stack.masks.real, twin.masks.real)


def test_attaching_the_same_twice_takes_one_step_at_a_time():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    for _ in range(2):
        mc.attach(optimizer, stack, mc.Blend(steps=5))
    assert learn(stack, optimizer, 5) == [1, 0.75, 0.5, 0.25, 0]


def test_attaching_one_stack_elsewhere_leaves_the_other_where_it_was():
    model = Two()
    both = torch.optim.SGD(mc.param_groups(model, lr=0.01, mask_lr=0.03))
    mc.attach(both, model, mc.Blend(steps=5))
    mc.attach(torch.optim.SGD(mc.param_groups(model.head, lr=0.01, mask_lr=0.03)), model.head, mc.Draw())
    learn(model, both, 2)
    assert (int(model.body[1].masks.progress), int(model.head.masks.progress)) == (2, 0)


def test_another_way_starts_at_its_first_step_and_the_same_continues():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    for how, expected in ((mc.Blend(steps=5), [1, 0.75]), (mc.Blend(steps=5), [0.5]), (mc.Blend(steps=3), [1, 0.5])):
        mc.attach(optimizer, stack, how)
        assert learn(stack, optimizer, len(expected)) == expected


def test_an_optimizer_and_its_model_are_forgotten_together():
    stack = mc.MaskedStack(mlp_blocks(3), fan_in=1)
    masks = weakref.ref(stack.masks)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack)
    del stack, optimizer
    gc.collect()
    assert masks() is None


def test_masks_that_favor_the_old_wiring_are_not_spread():
    def shares(**options):
        stack = blending(mc.MaskedStack(mlp_blocks(4), fan_in=1, mask_init=0.01), **options)
        return stack.masks.draw().mask_TS[-1]

    assert torch.equal(shares(), shares(uniform_floor=0.0))
    assert not torch.equal(shares(), shares(uniform_floor=0.1))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: mc.Blend(steps=4, uniform_floor=1), "uniform_floor is 1.0; it must be at least 0 and below 1"),
        (lambda: mc.Blend(steps=4, uniform_floor=-0.1), "uniform_floor is -0.1; it must be at least 0 and below 1"),
        (lambda: mc.Blend(steps=4, uniform_floor="no"), "uniform_floor is 'no'; it must be a number"),
        (lambda: mc.Blend(steps=4, gradient="none"), "it cannot blend them"),
        (lambda: mc.Draw(temperature=0.5), "temperature is 0.5; it must be 1"),
        (lambda: mc.Draw(temperature=0.0, steps=3), "nothing to cool down. Set temperature=1"),
        (lambda: mc.Draw(gradient="centered"), "gradient is 'centered'; it must be one of plain, direction, rms, none"),
        (lambda: mc.Draw(gradient="none", steps=3), "a control that draws from uniform masks"),
    ],
)
def test_a_way_to_learn_that_cannot_be_is_told(make, complaint):
    with pytest.raises(mc.ConfigError, match=complaint):
        make()


def test_what_is_attached_must_be_a_way_to_learn():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    with pytest.raises(mc.ConfigError, match=r"how is 9; it must be mc.Draw\(\) or mc.Blend\(steps=N\)"):
        mc.attach(optimizer, stack, 9)


def test_a_model_without_a_stack_is_told():
    model = nn.Linear(3, 3)
    with pytest.raises(mc.ConfigError, match="there is no MaskedStack in this Linear"):
        mc.attach(torch.optim.SGD(model.parameters()), model)


def test_masks_whose_gradient_was_turned_off_are_told():
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    stack.requires_grad_(False)
    with pytest.raises(mc.ConfigError, match="requires_grad of the real masks was turned off"):
        mc.attach(optimizer, stack)


@pytest.mark.parametrize("how", [mc.Blend(steps=5), mc.Draw(steps=5)])
def test_a_freeze_before_the_end_of_learning_is_told(how):
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, how)
    learn(stack, optimizer, 3)
    with pytest.warns(UserWarning, match=r"frozen after 3 of the 5 steps of mc\.(Blend|Draw), so .*; train for all"):
        mc.freeze(copy.deepcopy(stack))
    learn(stack, optimizer, 2)
    mc.freeze(stack)


def test_a_model_that_is_restored_from_its_state_dict_alone_continues_as_it_was():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Blend(steps=5))
    learn(stack, optimizer, 3)
    again = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    again.load_state_dict(stack.state_dict())
    assert again.masks.how == mc.Blend(steps=5)
    assert torch.equal(again(X), stack(X))


def test_attaching_another_way_to_a_restored_model_is_told():
    stack, again = (mc.MaskedStack(mlp_blocks(6), fan_in=2) for _ in range(2))
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Blend(steps=5))
    again.load_state_dict(stack.state_dict())
    resumed = torch.optim.SGD(mc.param_groups(again, lr=0.01, mask_lr=0.03))
    mc.attach(resumed, again)  # nothing had been learned yet
    learn(stack, optimizer, 3)
    again = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    again.load_state_dict(stack.state_dict())
    resumed = torch.optim.SGD(mc.param_groups(again, lr=0.01, mask_lr=0.03))
    with pytest.warns(UserWarning, match=r"restored after 3 steps by Blend\(.*; Draw\(.* starts at its first step"):
        mc.attach(resumed, again)


def test_loading_by_assignment_leaves_the_state_as_it_was():
    stack, again = (mc.MaskedStack(mlp_blocks(6), fan_in=2) for _ in range(2))
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack)
    learn(stack, optimizer, 3)
    mc.attach(torch.optim.SGD(mc.param_groups(again, lr=0.01, mask_lr=0.03)), again, mc.Blend(steps=5))
    with pytest.warns(UserWarning, match="the saved masks learned by"):
        again.load_state_dict(stack.state_dict(), assign=True)
    assert (int(stack.masks.progress), int(again.masks.progress)) == (3, 0)


def test_masks_that_were_frozen_when_attached_learn_once_a_learning_state_is_loaded():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    state = copy.deepcopy(stack.state_dict())
    mc.freeze(stack)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Blend(steps=5))
    stack.load_state_dict(state)
    assert learn(stack, optimizer, 5) == [1, 0.75, 0.5, 0.25, 0]


def test_numbers_of_numpy_and_torch_are_numbers():
    how = mc.Blend(steps=np.int64(5), uniform_floor=torch.tensor(0.25))
    assert how == mc.Blend(steps=5, uniform_floor=0.25)
    stack = blending(mc.MaskedStack(mlp_blocks(6), fan_in=2))
    stack.masks.learn_by(how)
    assert stack.state_dict()


def test_a_state_that_learned_otherwise_is_reported_and_starts_from_the_beginning():
    stack, again = (mc.MaskedStack(mlp_blocks(6), fan_in=2) for _ in range(2))
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack)
    learn(stack, optimizer, 3)
    mc.attach(torch.optim.SGD(mc.param_groups(again, lr=0.01, mask_lr=0.03)), again, mc.Blend(steps=5))
    with pytest.warns(UserWarning, match=r"the saved masks learned by Draw\(.*; mc.attach has set Blend\("):
        again.load_state_dict(stack.state_dict())
    assert int(again.masks.progress) == 0
    mc.freeze(stack)
    again.load_state_dict(stack.state_dict())  # frozen masks do not learn, so there is nothing to tell


def test_one_step_is_enough_to_blend():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.03))
    mc.attach(optimizer, stack, mc.Blend(steps=1))
    assert learn(stack, optimizer, 2) == [1, 0]


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("make", [lambda groups: torch.optim.SGD(groups, momentum=0.9), torch.optim.Adam])
def test_a_blended_run_continues_to_cool_where_it_was_saved(make, attached_first):
    def made(seed):
        torch.manual_seed(seed)
        model = Two()
        return model, make(mc.param_groups(model, lr=0.01, mask_lr=0.3))

    model, optimizer = made(0)
    mc.attach(optimizer, model, mc.Blend(steps=9))
    learn(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rest = learn(model, optimizer, 5)

    again, resumed = made(1)
    if attached_first:
        mc.attach(resumed, again, mc.Blend(steps=9))
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    if not attached_first:
        mc.attach(resumed, again, mc.Blend(steps=9))
    assert learn(again, resumed, 5) == rest == [0.5, 0.375, 0.25, 0.125, 0]
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "9"])
def test_steps_that_are_no_count_are_told(steps):
    for how in (mc.Blend, mc.Draw):
        with pytest.raises(mc.ConfigError, match=r"steps is .*; it must be (the number of optimizer steps|an integer)"):
            how(steps=steps)


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


def test_a_freeze_under_distributed_data_parallel_needs_no_new_wrapper(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        stack = mc.MaskedStack(mlp_blocks(7), fan_in=1)
        model = DistributedDataParallel(stack)
        optimizer = torch.optim.AdamW(mc.param_groups(stack, lr=0.01, mask_lr=0.3), weight_decay=0.1)
        mc.attach(optimizer, model)
        for frozen in (False, True):
            if frozen:
                mc.freeze(model)
            for _ in range(3):  # every parameter has a gradient, so none is unused
                before = stack.masks.real.detach().clone()
                model(X).square().sum().backward()
                assert stack.masks.real.grad.any() != frozen
                optimizer.step()
                optimizer.zero_grad()
                assert torch.equal(stack.masks.real, before) == frozen
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


def test_the_same_seed_gives_the_same_training_bitwise():
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


def _reply(stack, queue):
    queue.put(stack(X).detach().tolist())


def test_a_stack_can_be_sent_to_another_process():
    stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_reply, args=(stack, queue))
    process.start()
    found = queue.get()
    process.join()
    torch.testing.assert_close(torch.tensor(found), stack(X))  # the same draw


def test_masks_that_were_built_without_memory_start_as_they_should():
    def made():
        return mc.MaskedStack(mlp_blocks(6), fan_in=2, mask_init=0.5, seed=3)

    stack, expected = made().to("meta").to_empty(device="cpu"), made()
    for name, value in expected.masks.state_dict().items():
        assert torch.equal(stack.masks.state_dict()[name], value), name
    stack.masks.real.data.fill_(7)
    stack.masks.progress.fill_(5)
    stack.masks.reset_parameters()
    for name, value in expected.masks.state_dict().items():
        assert torch.equal(stack.masks.state_dict()[name], value), name


def test_fixed_masks_start_again_as_they_were_fixed():
    stack = mc.MaskedStack(mlp_blocks(6), fan_in=2, connectivity="random")
    wiring = stack.wiring()
    stack.to("meta").to_empty(device="cpu")
    assert stack.wiring() == wiring
    assert not stack.masks.real.requires_grad
