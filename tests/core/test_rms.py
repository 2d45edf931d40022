"""gradient="rms": every entry of a mask moves by its own scale."""

import copy

import torch
from networks import mlp_blocks, mlp_layers

import maskconnect as mc
from maskconnect.core.learning import RMS_DECAY

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def learner(steps=10, **options):
    torch.manual_seed(0)
    stack = mc.MaskedStack(mlp_layers(3, 3), fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.02))
    mc.attach(optimizer, stack, mc.Blend(steps=steps, gradient="rms", **options))
    return stack, optimizer


def step(stack, optimizer, scale=1.0):
    """The masks before a step, their gradient, and the masks after it."""
    optimizer.zero_grad()
    (scale * stack(X).square().mean()).backward()
    before, gradient = stack.masks.real.detach().clone(), stack.masks.real.grad.clone()
    optimizer.step()
    return before, gradient, stack.masks.real.detach().clone()


def test_an_entry_is_divided_by_the_root_mean_square_of_its_own_gradients_and_the_mean_is_left_out():
    stack, optimizer = learner()
    square = torch.zeros_like(stack.masks.real)
    for n in range(1, 6):
        before, gradient, after = step(stack, optimizer)
        square = RMS_DECAY * square + (1 - RMS_DECAY) * gradient**2
        even = gradient / (square / (1 - RMS_DECAY**n)).sqrt()
        move = 0.02 * (even - even.mean(dim=1, keepdim=True)) / 3**0.5
        torch.testing.assert_close(after, (before - move).clamp(0, 1), rtol=1e-4, atol=1e-6)


def test_the_scale_of_the_loss_does_not_matter():
    how, candidates, nothing = mc.Blend(steps=9, gradient="rms"), torch.ones(2, 4).bool(), torch.zeros(2, 4)
    gradient = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    moves = [
        how.descent(scale * gradient, candidates, how.squares(scale * gradient, nothing), 0) for scale in (1.0, 1e3)
    ]
    torch.testing.assert_close(*moves)


def test_a_restored_stack_continues_as_if_nothing_had_happened():
    stack, optimizer = learner()
    for _ in range(3):
        step(stack, optimizer)
    state = copy.deepcopy((stack.state_dict(), optimizer.state_dict()))
    other, again = learner()
    other.load_state_dict(state[0])
    again.load_state_dict(state[1])
    torch.testing.assert_close(step(other, again)[2], step(stack, optimizer)[2], rtol=0, atol=0)


def test_a_state_without_squares_is_that_of_version_0_1():
    stack, _ = learner()
    state = {name: value for name, value in stack.state_dict().items() if not name.endswith("square")}
    other, _ = learner()
    other.load_state_dict(state)
    assert not other.masks.square.any()


def test_a_gradient_that_is_not_finite_leaves_no_trace():
    how, before = mc.Blend(steps=9, gradient="rms"), torch.full((1, 2), 0.5)
    after = how.squares(torch.tensor([[float("inf"), 1.0]]), before)
    torch.testing.assert_close(after, torch.tensor([[0.5, RMS_DECAY * 0.5 + 1 - RMS_DECAY]]))


def test_entries_without_a_gradient_and_paddings_stay():
    torch.manual_seed(0)
    stack = mc.MaskedStack(mlp_blocks(4), fan_in=1)  # rows of one, two and three candidates
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.02))
    mc.attach(optimizer, stack, mc.Blend(steps=10, gradient="rms"))
    _, _, after = step(stack, optimizer)
    assert after.isfinite().all()
    assert not after[~stack.masks.candidate_TS].any()
    assert after[0, 0] == 1  # one candidate only
