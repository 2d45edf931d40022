"""Blended masks: all candidates are read, each in part, and the parts become the top-K as the temperature falls."""

import copy

import pytest
import torch
from networks import blending, conv_blocks, mlp_blocks, mlp_layers
from torch import nn

import maskconnect as mc
from maskconnect.core.aggregate import masked_total
from maskconnect.core.credit import Sampler
from maskconnect.core.sampling import shares

X = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
REAL_TS = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.9, 0.05, 0.05, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
CANDIDATE_TS = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()


def blended(stack, temperature=0.5, seed=0, **options):
    """The stack with uneven masks, which it blends."""
    masks = stack.masks
    generator = torch.Generator().manual_seed(seed)
    masks.real.data *= 0.2 + torch.rand(masks.real.shape, generator=generator)
    return blending(stack, temperature, **{"uniform_floor": 0.0, **options})


@pytest.mark.parametrize("temperature", [1, 0.5, 0.1, 1e-3, 1e-300])
@pytest.mark.parametrize("fan_in", [1, 2, 3])
def test_shares_add_up_to_k_and_none_is_more_than_a_whole(fan_in, temperature):
    share_TS = shares(REAL_TS, CANDIDATE_TS, torch.tensor([fan_in] * 4), temperature=temperature)
    torch.testing.assert_close(share_TS.sum(dim=1), torch.full((4,), float(fan_in), dtype=torch.float64))
    assert share_TS.min() >= 0
    assert share_TS.max() <= 1
    assert not share_TS[~CANDIDATE_TS].any()


def test_shares_are_in_proportion_to_the_masks_until_one_is_whole_and_at_last_the_top_k():
    def found(fan_in, temperature):
        share_TS = shares(REAL_TS[:1], CANDIDATE_TS[:1], torch.tensor([fan_in]), temperature=temperature)
        return share_TS[0].tolist()

    assert found(1, 1) == pytest.approx([0.5, 0.3, 0.2, 0])
    assert found(2, 1) == pytest.approx([1, 0.6, 0.4, 0])
    assert found(1, 0.5) == pytest.approx([x / 38 for x in (25, 9, 4, 0)])
    assert found(2, 0.001) == [1, 1, 0, 0]


def test_an_even_part_of_a_mask_goes_to_all_candidates_alike_and_the_top_k_stays():
    def found(temperature):
        fan_in_T = torch.tensor([1] * 4)
        return shares(REAL_TS, CANDIDATE_TS, fan_in_T, temperature=temperature, uniform_floor=0.2)

    assert found(1)[0].tolist() == pytest.approx([0.8 * m + 0.2 / 3 for m in (0.5, 0.3, 0.2)] + [0])
    assert found(1)[3].tolist() == pytest.approx([0.85, 0.05, 0.05, 0.05])
    assert found(0.001)[[0, 1, 3]].tolist() == [[1, 0, 0, 0]] * 3


@pytest.mark.parametrize(
    ("aggregation", "credit"),
    [(a, c) for a in ("mean", "sum") for c in ("whole", "new")] + [("scaled", "whole")],
)
def test_it_is_eq_1_with_shares_in_the_place_of_ones_forward_and_backward(aggregation, credit):
    stack = blended(mc.MaskedStack(conv_blocks(), 2, aggregation=aggregation), credit=credit).double()
    twin = copy.deepcopy(stack)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    ours = stack(x)
    ours.square().sum().backward()
    with mc.reference():
        theirs = twin(y)
        theirs.square().sum().backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(x.grad, y.grad)
    for (name, ours), (_, theirs) in zip(stack.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_what_a_target_reads_can_be_written_down():
    stack = blended(mc.MaskedStack(mlp_blocks(4), 2))
    read = []
    stack.blocks[3].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    outputs = []
    for block in stack.blocks[:3]:
        block.register_forward_hook(lambda module, args, y: outputs.append(y))
    stack(torch.randn(5, 6))
    share_S = stack.masks.draw().mask_TS[-1, :3].float()
    assert ((share_S > 0) & (share_S <= 1)).all()
    expected = sum(p * y for p, y in zip(share_S, outputs, strict=True)) / 2
    torch.testing.assert_close(read[0], expected)


def test_every_candidate_is_trained():
    stack = blended(mc.MaskedStack(mlp_blocks(5), 1))
    stack(torch.randn(3, 6)).square().sum().backward()
    assert all(p.grad.any() for p in stack.blocks.parameters())


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_candidate_whose_mask_was_clipped_to_0_is_trained_if_a_part_is_spread_evenly(floor):
    first, (reader, _) = mlp_layers(2, 2)
    stack = blending(mc.MaskedStack([first, [reader]], 1), uniform_floor=floor)
    stack.masks.real.data[:] = torch.tensor([1.0, 0.0])
    stack(torch.randn(3, 6)).square().sum().backward()
    trained = [any(p.grad.any() for p in block.parameters()) for block in (*first, reader)]
    assert trained == [True, floor > 0, True]


@pytest.mark.parametrize("use_all", [False, True])
@pytest.mark.parametrize("layered", [False, True])
def test_as_the_temperature_falls_nothing_jumps_until_the_freeze(layered, use_all):
    modules = mlp_layers(4, 4) if layered else mlp_blocks(8)
    stack = blended(mc.MaskedStack(modules, 1 if layered else 2, use_all=use_all), temperature=1e-9, seed=3)
    x = torch.randn(3, 6)
    last = stack(x)
    stack.masks.progress += 2
    torch.testing.assert_close(stack(x), last)
    mc.freeze(stack)
    torch.testing.assert_close(stack(x), last)
    if use_all:
        assert all(stack.masks.fixed.readers[: stack.layout.layers[-1].start])


def test_a_blend_takes_no_random_numbers():
    stack = blended(mc.MaskedStack(mlp_blocks(5), 2))
    before = stack.masks.generator.get_state()
    x = torch.randn(3, 6)
    assert torch.equal(stack(x), stack(x))
    assert torch.equal(stack.masks.generator.get_state(), before)


def test_an_aggregation_of_ones_own_gets_the_shares():
    seen = []

    def weighted(sources, mask):
        seen.append(mask.detach())
        return sum(m * y for m, y in zip(mask, sources, strict=True))

    stack = blended(mc.MaskedStack(mlp_blocks(4), 2, aggregation=weighted))
    stack(torch.randn(3, 6)).sum().backward()
    assert seen[-1].sum().item() == pytest.approx(2)
    assert (stack.masks.real.grad[-1] != 0).all()


def test_sources_of_half_precision_are_added_up_in_single():
    sources = [torch.full((2, 3), value, dtype=torch.float16) for value in (60000.0, 60000.0, -60000.0)]
    x = masked_total(
        torch.full((3,), 0.75), sources, 1, Sampler().seen((1.0, list(enumerate(sources)))), weights=[0.75] * 3
    )
    assert x.dtype == torch.float16
    assert (x == 45000).all()  # on the way it is 90000, too much for float16


def test_sources_may_differ_in_precision():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = blended(mc.MaskedStack([torch.nn.Identity(), torch.nn.Linear(6, 6), torch.nn.Identity()], 1))
        mixed(torch.randn(3, 6)).float().sum().backward()
    assert mixed.masks.real.grad[-1].isfinite().all()


def test_with_decay_masks_move_by_less_and_less_and_at_last_not_at_all():
    def moves(**options):
        torch.manual_seed(0)
        stack = mc.MaskedStack(mlp_blocks(5), fan_in=2)
        optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.0, mask_lr=0.01))
        mc.attach(optimizer, stack, mc.Blend(steps=5, **options))
        x, found = torch.randn(8, 6), []
        for _ in range(5):
            optimizer.zero_grad()
            stack(x).square().mean().backward()
            before = stack.masks.real.detach().clone()  # normalized by the forward pass
            optimizer.step()
            found.append((stack.masks.real - before).norm(dim=1).max().item())
        return found

    assert moves() == pytest.approx([0.01] * 5, rel=1e-3)
    assert moves(decay=True) == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0], rel=1e-3, abs=1e-9)


def test_decay_is_on_or_off():
    with pytest.raises(mc.ConfigError, match=r"decay is 0.5; it must be True or False."):
        mc.Blend(steps=5, decay=0.5)


@pytest.mark.parametrize("how", [mc.Draw(), mc.Blend(steps=10)], ids=["draw", "blend"])
def test_branches_may_write_over_their_input(how):
    def learned(inplace):
        torch.manual_seed(0)
        layers = [[nn.Sequential(nn.ReLU(inplace), nn.Linear(6, 6)) for _ in range(3)] for _ in range(3)]
        stack = mc.MaskedStack(layers, fan_in=2)
        stack.masks.learn_by(how)
        x = torch.linspace(-1, 1, 24).reshape(4, 6)
        stack(x.clone()).square().sum().backward()
        return [p.grad for p in stack.parameters()]

    torch.testing.assert_close(learned(inplace=True), learned(inplace=False), rtol=0, atol=0)


class Whole(nn.Linear):
    """Returns float32 under autocast, too, as branches that end in a LayerNorm do on a GPU."""

    def forward(self, x):
        return super().forward(x).float()


def test_branches_may_return_float32_under_autocast():
    stack = mc.MaskedStack([[Whole(6, 6) for _ in range(3)] for _ in range(3)], fan_in=2)
    stack.masks.learn_by(mc.Blend(steps=10))
    slow, x = copy.deepcopy(stack), torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stack(x).square().sum().backward()
        with mc.reference():
            slow(x).square().sum().backward()
    for p, q in zip(stack.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05 * float(q.grad.abs().max()))
