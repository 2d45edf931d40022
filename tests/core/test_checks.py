"""Every bad argument is one clear MaskConnectError."""

import re

import numpy
import pytest
import torch
from networks import mlp_blocks, mlp_layers
from torch import nn

import maskconnect as mc


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fan_in": 0}, "fan_in is 0; a target needs at least 1 source. Set fan_in to 1 or more."),
        ({"fan_in": -3}, "fan_in is -3; a target needs at least 1 source"),
        ({"fan_in": 2.0}, "fan_in is 2.0; it must be an integer"),
        ({"fan_in": "2"}, "fan_in is '2'; it must be an integer"),
        ({"fan_in": True}, "fan_in is True; it must be an integer"),
        ({"fan_in": torch.tensor([1, 2])}, "it must be an integer"),
        ({"fan_in": [1, 2]}, "fan_in has 2 entries; the stack has 3 targets"),
        ({"fan_in": [1, 2, 0]}, "fan_in is 0"),
        ({}, "connectivity 'learned' needs fan_in"),
        ({"connectivity": "random"}, "connectivity 'random' needs fan_in"),
        ({"fan_in": 2, "connectivity": "lerned"}, "connectivity is 'lerned'; it must be one of learned, prev, full"),
        ({"fan_in": 2, "connectivity": "lerned"}, "Did you mean 'learned'?"),
        ({"fan_in": 2, "connectivity": None}, "connectivity holds None; a wiring has a list of sources"),
        ({"fan_in": 2, "connectivity": numpy.eye(4)}, "; a wiring has a list of sources"),
        (
            {"fan_in": 2, "aggregation": numpy.eye(4)},
            "it must be one of mean, residual, stream, sum, scaled, or a callable",
        ),
        (
            {"fan_in": 2, "aggregation": "max"},
            "aggregation is 'max'; it must be one of mean, residual, stream, sum, scaled, or a callable",
        ),
        ({"fan_in": 2, "align": "pad"}, "align is 'pad'; it must be 'nhwc' or a callable"),
        ({"fan_in": 2, "seed": -1}, "seed is -1; it must be at least 0"),
        ({"fan_in": 2, "seed": 2**64}, "it must be at least 0 and below 2**63"),
        ({"fan_in": 2, "seed": 1.5}, "seed is 1.5; it must be an integer"),
        ({"fan_in": 2, "wiring": [[], [0], [3], [0]]}, "wiring: module 2 lists source 3; it may read only"),
        ({"connectivity": [[], [0], [2], [0]]}, "connectivity: module 2 lists source 2; it may read only"),
        ({"connectivity": "prev", "wiring": [[], [0], [0], [0]]}, "module 2 reads [1]; `wiring` allows [0]"),
        ({"connectivity": [[], [0], [1], [1]], "wiring": [[], [0], [0], [1]]}, "module 2 reads [1]; `wiring`"),
    ],
)
def test_a_bad_argument_of_a_stack(arguments, says):
    with pytest.raises(mc.MaskConnectError, match=re.escape(says)):
        mc.MaskedStack(mlp_blocks(4), **arguments)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([], "modules is empty; a stack needs at least 1 module"),
        ([[nn.Identity()], []], "modules[1] is empty; a layer needs at least 1 module"),
        ([nn.Identity(), [nn.Identity()]], "modules mixes modules and lists of modules (entry 1)"),
        ([nn.Identity(), 3], "modules[1] is int; it must be an nn.Module"),
        (nn.Identity(), "modules is a Identity; it must be a list of modules"),
        ("blocks", "modules[0] is str; it must be an nn.Module"),
    ],
)
def test_bad_modules(modules, says):
    with pytest.raises(mc.ConfigError, match=re.escape(says)):
        mc.MaskedStack(modules, fan_in=1)


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"lr": 0.1, "mask_lr": -0.1}, "mask_lr is -0.1; it must be a finite number of 0 or more"),
        ({"lr": -1, "mask_lr": 0.1}, "lr is -1"),
        ({"lr": True, "mask_lr": 0.1}, "lr is True"),
        ({"lr": 0.1, "mask_lr": float("nan")}, "mask_lr is nan"),
        ({"lr": 0.1, "mask_lr": "fast"}, "mask_lr is 'fast'"),
        ({"lr": 0.1, "mask_lr": 0.1, "weight_decay": -1e-4}, "weight_decay is -0.0001"),
    ],
)
def test_a_bad_rate(rates, says):
    with pytest.raises(mc.ConfigError, match=re.escape(says)):
        mc.param_groups(mc.MaskedStack(mlp_blocks(3), 1), **rates)


@pytest.mark.parametrize("verb", [mc.freeze, mc.wiring_of])
def test_a_model_without_a_stack(verb):
    with pytest.raises(mc.ConfigError, match="there is no MaskedStack in this Linear"):
        verb(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: mc.freeze(None),
        lambda: mc.wiring_of("model"),
        lambda: mc.param_groups([nn.Linear(2, 2)], lr=0.1, mask_lr=0.1),
    ],
)
def test_what_is_not_a_model_is_an_error(call):
    with pytest.raises(mc.ConfigError, match=r"it must be an nn\.Module"):
        call()


def test_attach_with_its_arguments_swapped():
    stack = mc.MaskedStack(mlp_blocks(3), 1)
    with pytest.raises(mc.ConfigError, match=r"optimizer is a MaskedStack; call mc.attach\(optimizer, model\)"):
        mc.attach(stack, torch.optim.SGD(stack.parameters(), lr=0.1))


def test_lbfgs_must_take_the_weights_only():
    stack = mc.MaskedStack(mlp_blocks(3), 1)
    with pytest.raises(mc.ConfigError, match="LBFGS evaluates the loss several times per step"):
        mc.attach(torch.optim.LBFGS(stack.parameters()), stack)


def test_an_optimizer_that_lost_the_masks_says_so_at_its_next_step():
    stack = mc.MaskedStack(mlp_blocks(3), 1)
    optimizer = torch.optim.Adam(mc.param_groups(stack, lr=0.1, mask_lr=0.1))
    mc.attach(optimizer, stack)
    stack.load_state_dict(stack.state_dict() | {"masks.real": torch.eye(2)}, assign=True)
    stack(torch.randn(2, 6)).sum().backward()
    with pytest.raises(mc.ConfigError, match="after the model has been loaded"):
        optimizer.step()


def test_rates_may_be_numbers_of_any_library():
    groups = mc.param_groups(mc.MaskedStack(mlp_blocks(3), 1), lr=numpy.float32(0.5), mask_lr=torch.tensor(0.25))
    assert [float(group["lr"]) for group in groups] == [0.5, 0.25]


def test_integers_may_be_numpys():
    stack = mc.MaskedStack(mlp_blocks(4), numpy.int64(2), connectivity="random", seed=numpy.int64(3))
    assert mc.wiring_of(stack) == mc.wiring_of(mc.MaskedStack(mlp_blocks(4), 2, connectivity="random", seed=3))


def test_modules_that_return_no_tensor_need_an_aggregation_that_understands_them():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(mc.ConnectivityError, match="module 0 returned a tuple; built-in aggregations need"):
        mc.MaskedStack([Pair(), nn.Identity()], 1)(torch.ones(1))


def test_a_damaged_state_of_the_generator():
    stack = mc.MaskedStack(mlp_blocks(3), 1)
    with pytest.raises(mc.CheckpointError, match="the saved masks are damaged"):
        stack.load_state_dict(stack.state_dict() | {"masks._extra_state": torch.zeros(3, dtype=torch.uint8)})


def test_an_optimizer_without_the_masks():
    stack = mc.MaskedStack(mlp_layers(2, 2), 1)
    with pytest.raises(mc.ConfigError, match="does not hold the masks"):
        mc.attach(torch.optim.SGD(stack.blocks.parameters(), lr=0.1), stack)


def test_every_error_is_a_mask_connect_error():
    for kind in (mc.ConfigError, mc.ConnectivityError, mc.CheckpointError):
        assert issubclass(kind, mc.MaskConnectError)


@pytest.mark.parametrize("connectivity", ["learned", "random"])
def test_a_fan_in_that_no_target_can_have_is_reported_with_the_largest_possible(connectivity):
    with pytest.warns(UserWarning, match="fan_in is 99, but no module has more than 3 candidates: K is 3"):
        stack = mc.MaskedStack(mlp_blocks(4), 99, connectivity=connectivity)
    assert stack.masks.fan_in.tolist() == [1, 2, 3]
