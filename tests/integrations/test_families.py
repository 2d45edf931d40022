"""Families of transformers and timm, from rewiring to the pruned model."""

import copy
from pathlib import Path

import pytest
import torch
from families import FAMILIES, table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import maskconnect as mc
from maskconnect.core.lookup import stacks_of

STEPS = 20
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "rewire.md"
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:.*:DeprecationWarning")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def outputs(model, inputs, seed=0):
    """All tensors that a model returns."""
    torch.manual_seed(seed)
    return [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, Tensor)]


def assert_equal(found, wanted):
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=False)


def weights(model):
    return sum(p.numel() for p in model.parameters())


def rewired(model, family, **options):
    return mc.rewire(model, family.path, **family.options, **options)


def depth(model, family):
    return len(stacks_of(rewired(copy.deepcopy(model), family, connectivity="prev"))[0][1].flat())


def without(count, unread, fan_in):
    """A wiring in which each block reads the nearest `fan_in` before it, and none reads those in `unread`."""
    return [sorted([k for k in range(j) if k not in unread][-fan_in:]) for j in range(count)]


@every_family
def test_with_the_old_wiring_the_model_computes_the_same_bitwise(family):
    plain, inputs = family.model(), family.inputs()
    model = rewired(copy.deepcopy(plain), family, connectivity="prev")
    for training in (False, True):
        for seed in range(3):
            wanted = outputs(plain.train(training), inputs, seed)
            assert_equal(outputs(model.train(training), inputs, seed), wanted)


@every_family
def test_a_checkpoint_of_the_plain_model_loads(family):
    plain, inputs = family.model().eval(), family.inputs()
    model = rewired(family.model(), family, connectivity="prev").eval()
    names = [name for name in model.state_dict() if ".masks." not in name]
    assert names == list(plain.state_dict())
    assert any(".masks." in name for name in model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert_equal(outputs(model, inputs), outputs(plain, inputs))


@every_family
def test_masks_learn_and_the_frozen_model_can_be_pruned_and_saved(family, tmp_path):
    inputs = family.inputs()
    model = rewired(family.model(), family, fan_in=2, mask_init="uniform").train()
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=1e-3, mask_lr=0.1))
    mc.attach(optimizer, model, mc.Blend(steps=STEPS) if family.library == "timm" else mc.Draw())
    before = model.state_dict()[f"{stacks_of(model)[0][0]}.masks.real"].clone()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = outputs(model, inputs, seed=step)[0].square().mean()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
    mc.freeze(model)
    stack = stacks_of(model)[0][1]
    assert not torch.equal(stack.masks.real, before)
    check_what_follows(model.eval(), family, inputs, tmp_path, {"fan_in": 2})


@every_family
@pytest.mark.parametrize("fan_in", [1, 2], ids=["chain", "joins"])
def test_blocks_that_a_wiring_leaves_unread_go(family, fan_in, tmp_path):
    plain, inputs = family.model(), family.inputs()
    count = depth(plain, family)
    unread = {1, count - 3}
    fixed = {"connectivity": without(count, unread, fan_in)}
    model = rewired(plain, family, **fixed).eval()
    pruned = check_what_follows(model, family, inputs, tmp_path, fixed)
    gone = sum(weights(stacks_of(model)[0][1].flat()[k]) for k in unread)
    assert gone > 0
    masks = sum(weights(stack.masks) for _, stack in stacks_of(model))
    assert weights(pruned) == weights(model) - masks - gone


def check_what_follows(model, family, inputs, folder, options):
    """A frozen model skips unread blocks; pruned, saved and loaded, it computes the same."""
    first, second, third = (outputs(model, inputs) for _ in range(3))
    assert all(y.isfinite().all() for y in first if y.is_floating_point())
    assert first[0].std() > 1e-4
    assert_equal(second, first)
    assert_equal(third, first)
    pruned = mc.prune(model, inputs).eval()
    assert_equal(outputs(pruned, inputs), first)
    stack = stacks_of(model)[0][1]
    assert (weights(pruned) < weights(model) - weights(stack.masks)) == (not all(stack.masks.current_wiring().alive))
    for kind, saved in (("frozen", model), ("pruned", pruned)):
        mc.save(saved, folder / kind)
        torch.manual_seed(7)
        fresh = rewired(family.model(), family, **options)
        again = mc.load(folder / kind, into=fresh)
        assert_equal(outputs(again, inputs), first)
    return pruned


@every_family
def test_a_pruned_model_can_be_exported(family):
    plain, inputs = family.model().eval(), family.inputs()
    count = depth(plain, family)
    model = rewired(plain, family, connectivity=without(count, {1, count - 3}, 2)).eval()
    pruned = mc.prune(model, inputs).eval()
    program = torch.export.export(pruned, (), inputs, strict=False)
    for a, b in zip(outputs(program.module(), inputs), outputs(pruned, inputs), strict=True):
        torch.testing.assert_close(a, b)
    assert not any("masks" in name for name in program.state_dict)


def test_the_page_lists_the_families_that_are_tested():
    assert table() in PAGE.read_text()
