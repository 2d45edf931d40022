"""`use_all`: every module is read, at the least cost."""

import itertools
import random

import pytest
import torch
from networks import mlp_blocks, mlp_layers

import maskconnect as mc
from maskconnect.core.wiring import Layout, cover, random_sources

CHAIN, LAYERED = Layout((1,) * 8, layered=False), Layout((4, 4, 4), layered=True)


def is_covered(sources, layout):
    return set(range(layout.layers[-1].start)) <= {k for row in sources for k in row}


@pytest.mark.parametrize("layout", [CHAIN, LAYERED], ids=["chain", "layered"])
@pytest.mark.parametrize("fan_in", [1, 2, 3])
def test_every_module_is_read_and_nothing_else_is_lost(layout, fan_in):
    candidates = layout.candidates()
    counts = [min(fan_in, len(candidates[target])) for target in layout.targets]
    for seed in range(50):
        sources = random_sources(candidates, counts, seed)
        worth = random.Random(seed)
        found = cover(sources, candidates, layout, lambda target, k, worth=worth: worth.random())
        assert is_covered(found, layout)
        assert [len(row) for row in found] == [len(row) for row in sources]
        assert all(set(row) <= set(may) for row, may in zip(found, candidates, strict=True))
        if is_covered(sources, layout):
            assert found == sources


def test_the_cheapest_swap_is_made():
    """Module 2 is unread; either target could give up module 0, the second at less cost."""
    layout = Layout((1,) * 5, layered=False)
    sources = ((), (0,), (0, 1), (0, 1), (0, 3))
    score = {(3, 0): 0.6, (3, 1): 0.5, (3, 2): 0.1, (4, 0): 0.3, (4, 1): 0.2, (4, 2): 0.2, (4, 3): 0.9}
    found = cover(sources, layout.candidates(), layout, lambda *pair: score[pair])
    assert found == ((), (0,), (0, 1), (0, 1), (2, 3))


def test_what_nobody_may_read_stays_unread():
    layout = Layout((1,) * 4, layered=False)
    candidates = ((), (0,), (0,), (0, 2))
    assert cover(((), (0,), (0,), (0,)), candidates, layout, lambda *_: 0.0) == ((), (0,), (0,), (2,))


def test_a_chain_of_swaps_is_found_where_no_single_one_is_left():
    """With one source per target some draws leave a module unread that only two swaps together can have read."""
    wiring = [[], [0], [0], [1], [0, 3], [2, 4], [1, 2, 3, 4]]
    stack = mc.MaskedStack(mlp_blocks(7), 1, wiring=wiring, use_all=True)
    candidates, layout = stack.masks.candidates, stack.layout
    for choice in itertools.product(*candidates[1:]):
        sources = ((), *((k,) for k in choice))
        found = cover(sources, candidates, layout, lambda target, k: 0.0)
        assert {k for row in found for k in row} == {0, 1, 2, 3, 4}, choice  # module 5 may be read by nobody
    assert all(min(stack.masks.draw().readers[:5]) > 0 for _ in range(50))


@pytest.mark.parametrize("layered", [False, True])
def test_draws_and_the_freeze_use_all_modules(layered):
    modules = mlp_layers(3, 4) if layered else mlp_blocks(7)
    stack = mc.MaskedStack(modules, 2, use_all=True)
    with torch.no_grad():
        stack.masks.real.copy_(torch.rand(stack.masks.real.shape) * (stack.masks.real > 0))
    readers = [stack.masks.draw().readers for _ in range(30)]
    ends = stack.layout.layers[-1].start
    assert all(min(found[:ends]) > 0 for found in readers)
    assert len({stack.masks.draw().sources for _ in range(30)}) > 1
    mc.freeze(stack)
    assert all(stack.masks.current_wiring().alive)


def test_without_it_modules_are_left_out():
    stack = mc.MaskedStack(mlp_blocks(7), 1)
    assert not all(all(stack.masks.draw().alive) for _ in range(30))


def test_random_connectivity_can_use_all_modules():
    plain = mc.MaskedStack(mlp_blocks(8), 2, connectivity="random", seed=3)
    whole = mc.MaskedStack(mlp_blocks(8), 2, connectivity="random", use_all=True, seed=3)
    assert not all(plain.masks.current_wiring().alive)
    assert all(whole.masks.current_wiring().alive)


def test_a_saved_network_remembers(tmp_path):
    model = mc.resnext(11, 4, 4, 10, 1, use_all=True)
    mc.save(model, tmp_path / "saved")
    assert mc.load(tmp_path / "saved").stack.masks.use_all


def test_it_is_true_or_false():
    with pytest.raises(mc.ConfigError, match="use_all is 'no'; it must be True or False"):
        mc.MaskedStack(mlp_blocks(3), 1, use_all="no")


def test_a_random_wiring_that_is_frozen_in_the_end_uses_all_too():
    for seed in range(5):
        model = mc.resnet(20, 10, 2, use_all=True, seed=seed)
        model.stack.masks.fix_at_random(seed)
        assert mc.wiring_of(model) == mc.wiring_of(mc.resnet(20, 10, 2, connectivity="random", use_all=True, seed=seed))
        assert all(model.stack.masks.current_wiring().readers[:-1])
