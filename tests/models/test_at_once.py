"""All branches of a ResNeXt at once: equal to the readable path in every respect, and left to it where not covered."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from networks import blending
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import assert_same, both_ways, largest_difference

import maskconnect as mc
from maskconnect.core.reference import is_reference, reference
from maskconnect.models import save_memory_
from maskconnect.models.branches import SharedBatchNorm
from maskconnect.models.groups import group_norms_
from maskconnect.models.resnext_fast import at_once

X = torch.linspace(-2, 2, 4 * 3 * 12 * 12, dtype=torch.float64).sin().reshape(4, 3, 12, 12) * 3


@pytest.fixture
def passes(monkeypatch):
    """How many forward passes went the fast way."""
    count, run = [], at_once.run

    def spy(*args, **kwargs):
        found = run(*args, **kwargs)
        count.append(found is not None)
        return found

    monkeypatch.setattr(at_once, "run", spy)
    return count


def network(depth=20, width=4, cardinality=4, fan_in=2, dtype=torch.float64, **options):
    torch.manual_seed(1)
    model = mc.resnext(depth, width, cardinality, 7, fan_in, **options)
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight, 1, 0.2)
        nn.init.normal_(norm.bias, 0, 0.3)
    return model.to(dtype)


def one_step(model, x=X):
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return y.detach()


NETWORKS = {
    "learned": {},
    "a single source": {"fan_in": 1, "cardinality": 5},
    "all sources": {"fan_in": 4},
    "wide": {"width": 64, "fan_in": 3},
    "wide, a single source": {"width": 64, "cardinality": 3, "fan_in": 1},
    "deep": {"depth": 47},
    "one branch": {"cardinality": 1, "fan_in": 1},
    "mini": {"stem": "mini"},
    "imagenet": {"depth": 50, "stem": "imagenet", "cardinality": 3},
    "fixed at random": {"connectivity": "random"},
    "fixed, one source": {"connectivity": "random", "fan_in": 1, "cardinality": 6},
    "plain ResNeXt": {"connectivity": "full", "fan_in": None},
    "chains": {"connectivity": "prev", "fan_in": None},
}


@pytest.mark.parametrize("lean", [False, True], ids=["", "lean"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_the_readable_path(name, lean, passes):
    model = network(**NETWORKS[name])
    model.stack.aggregation.lean = lean

    def steps(model):
        masks = [p for n, p in model.named_parameters() if n.endswith("masks.real") and p.requires_grad]
        for _ in range(2):  # in the second with other masks; gradients are accumulated
            one_step(model, x)
            with torch.no_grad():
                for p in masks:
                    p.add_(0.3 * torch.rand_like(p)).clamp_(0, 1)
        return one_step(model, x)

    x = F.interpolate(X, scale_factor=4, mode="bilinear") if name == "imagenet" else X
    torch.manual_seed(2)
    state = torch.get_rng_state()
    both_ways(model, lambda m: (torch.set_rng_state(state), steps(m))[1])
    assert passes == [True] * 3


@pytest.mark.parametrize("lean", [False, True], ids=["", "lean"])
@pytest.mark.parametrize("name", ["learned", "a single source", "all sources", "wide"])
def test_blended_masks_agree(name, lean, passes):
    model = network(**NETWORKS[name])
    model.stack.aggregation.lean = lean
    masks = model.stack.masks
    masks.real.data *= torch.rand_like(masks.real)
    blending(model.stack, 0.7)
    both_ways(model, one_step)
    assert passes == [True]
    share_TS = masks.draw().mask_TS
    assert name == "all sources" or ((share_TS > 0) & (share_TS < 1)).any()


@pytest.mark.parametrize("seed", range(6))
def test_random_wirings_images_and_fan_ins_agree(seed, passes):
    choose = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=choose))

    cardinality = number(2, 6)
    model = network(
        depth=(11, 20, 29)[seed % 3],
        width=number(1, 6),
        cardinality=cardinality,
        fan_in=number(1, cardinality),
        connectivity=("learned", "random")[seed % 2],
        seed=seed,
    )
    x = torch.randn(number(1, 9), 3, number(5, 14), number(5, 14), dtype=torch.float64, generator=choose)
    both_ways(model, lambda m: one_step(m, x))
    model.zero_grad()
    both_ways(model.eval(), lambda m: one_step(m, x))
    assert passes == [True] * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_agrees(frozen, passes):
    model = network(fan_in=1)
    one_step(model)
    if frozen:
        model.stack.masks.freeze()
    model.zero_grad()
    both_ways(model.eval(), one_step)
    with torch.inference_mode():
        found = model(X)
        with reference():
            assert largest_difference(found, model(X)) < 1e-12
    assert passes == [True] * 3


def test_two_backward_passes_agree(passes):
    def use(model):
        y = model(X)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return y.detach()

    both_ways(network(), use)
    assert passes == [True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_agrees(reentrant, passes):
    def use(model):
        x = X.clone().requires_grad_()
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=reentrant)
            y.square().sum().backward()
        return torch.cat([y.detach().flatten(), x.grad.flatten()])

    both_ways(network(), use)
    assert passes == [True] * 4


def test_a_few_images_at_a_time_are_as_good_as_all(monkeypatch):
    together = network()
    apart = copy.deepcopy(together)
    y = one_step(together)
    monkeypatch.setattr("maskconnect.models.resnext_fast.products.IN_CACHE", 2**17)  # one, two or three
    assert largest_difference(one_step(apart), y) < 1e-12
    assert_same(apart, together)


@pytest.mark.parametrize("pixels", [0, 10_000])
def test_small_images_in_one_product_are_as_good_as_one_by_one(monkeypatch, pixels):
    usual = network()
    other = copy.deepcopy(usual)
    y = one_step(usual)
    monkeypatch.setattr("maskconnect.models.resnext_fast.products.FEW_PIXELS", pixels)
    monkeypatch.setattr("maskconnect.models.resnext_fast.products.MANY_IMAGES", 2)
    monkeypatch.setattr("maskconnect.models.resnext_fast.products._is_small", lambda *_: False)  # as for large weights
    assert largest_difference(one_step(other), y) < 1e-11
    assert_same(other, usual)


def test_in_single_precision_it_is_as_near_to_the_truth_as_the_readable_path():
    model = network(dtype=torch.float32)
    truth, readable = copy.deepcopy(model).double(), copy.deepcopy(model)
    with torch.no_grad():
        x = X.float() + 30  # means that are large beside deviations
        expected, found = truth(x.double()), model(x)
        with reference():
            other = readable(x)
    error, usual = largest_difference(found.double(), expected), largest_difference(other.double(), expected)
    assert error < 5 * usual + 1e-6
    for p, q in zip(model.buffers(), truth.buffers(), strict=True):
        assert largest_difference(p.double(), q.double()) < 1e-4


def test_channels_last_networks_agree(passes):
    model = network().to(memory_format=torch.channels_last)
    both_ways(model, lambda m: one_step(m, X.contiguous(memory_format=torch.channels_last)))
    assert passes == [True]


def test_parameters_that_do_not_learn_get_no_gradient(passes):
    def use(model):
        for p in model.stack.blocks[1][0].parameters():
            p.requires_grad_(False)
        return one_step(model)

    both_ways(network(), use)
    assert passes == [True]


def test_only_masks_may_learn(passes):
    def use(model):
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("real"))
        return one_step(model)

    both_ways(network(), use)
    assert passes == [True]


@torch.no_grad()
def spoil(model, value):
    """Make the output of the first branch of the second module a NaN, or so."""
    model.stack.blocks[1][0].residual[-1].bias.fill_(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_source_that_is_not_finite_spoils_only_those_that_read_it(value, passes):
    model = network(fan_in=1, cardinality=6)
    spoil(model, value)
    twin = copy.deepcopy(model)
    twin.stack.blocks[0][0].register_forward_hook(lambda *_: None)  # so that its branches run one by one
    good = [model(X).isfinite().all() for _ in range(12)]
    assert good == [twin(X).isfinite().all() for _ in range(12)]
    assert passes == [False] * 12
    assert any(good)
    assert not all(good)


def test_so_it_is_with_norms_in_eval_mode(passes):
    model = network(fan_in=1, cardinality=6).eval()
    model.stack.training = True
    with torch.no_grad():
        model.stack.blocks[1][0].residual[0].weight.fill_(torch.nan)
    twin = copy.deepcopy(model)
    twin.stack.blocks[0][0].register_forward_hook(lambda *_: None)
    good = [model(X).isfinite().all() for _ in range(12)]
    assert good == [twin(X).isfinite().all() for _ in range(12)]
    assert passes == [False] * 12
    assert any(good)


def test_where_inputs_cancel_the_variance_is_taken_of_the_outputs(passes):
    """Two channels that are almost equal, and a convolution that takes their difference."""
    model = network(dtype=torch.float32)
    with torch.no_grad():
        for branch in model.stack.blocks[2]:
            conv, norm, expand = branch.residual[3], branch.residual[4], branch.residual[6]
            conv.weight[1] = conv.weight[0] * (1 + 1e-3 * torch.randn_like(conv.weight[0]))
            norm.weight[:2], norm.bias[:2] = 1.0, 1.0
            expand.weight.zero_()
            expand.weight[:, 0], expand.weight[:, 1] = 1.0, -1.0
            branch.residual[7].weight.fill_(100.0)
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        assert largest_difference(model(X.float()).double(), truth(X)) < 0.01
    assert passes == [False, True]


class Doubling(SharedBatchNorm):
    """A norm of the user."""

    def forward(self, xs, alive):
        return {k: 2 * x for k, x in super().forward(xs, alive).items()}


def share_a_norm(model):
    model.stack.blocks[2][0].residual[4] = model.stack.blocks[3][0].residual[4]


NOT_COVERED = {
    "a hook at the aggregation": lambda m: m.stack.aggregation.register_forward_hook(
        lambda _, __, xs: [2 * x for x in xs]
    ),
    "a shared norm of the user": lambda m: setattr(m.stack.aggregation.shortcuts["2"], "norm", Doubling(128)),
    "a norm that two modules share": share_a_norm,
    "no tracking": lambda m: setattr(m.stack.blocks[0][1].residual[1], "track_running_stats", False),
    "no count": lambda m: setattr(m.stack.blocks[0][1].residual[1], "num_batches_tracked", None),
    "nothing but one convolution": lambda m: setattr(
        m.stack.blocks[0][0], "residual", nn.Sequential(nn.Conv2d(16, 64, 1, bias=False).double())
    ),
    **{
        f"nothing at {place}": lambda m, place=place: m.stack.blocks[1][0].residual.__setitem__(place, nn.Identity())
        for place in (1, 2, 3, 4, 5, 7)
    },
    "a hook": lambda m: m.stack.blocks[0][1].register_forward_hook(lambda *_: None),
    "a hook inside": lambda m: m.stack.blocks[1][2].residual[3].register_forward_pre_hook(lambda *_: None),
    "a hook at the shortcut": lambda m: m.stack.aggregation.shortcuts["0"].conv.register_forward_hook(lambda *_: None),
    "another layer": lambda m: m.stack.blocks[0][1].residual.__setitem__(2, nn.LeakyReLU()),
    "one layer more": lambda m: m.stack.blocks[0][1].residual.append(nn.Dropout(0.0)),
    "a parametrization": lambda m: parametrizations.weight_norm(m.stack.blocks[0][1].residual[0]),
    "another momentum": lambda m: setattr(m.stack.blocks[0][1].residual[1], "momentum", 0.3),
    "no momentum": lambda m: [setattr(p, "momentum", None) for p in m.modules() if isinstance(p, nn.BatchNorm2d)],
    "one norm in eval mode": lambda m: m.stack.blocks[0][1].residual[1].eval(),
    "another forward": lambda m: setattr(m.stack.blocks[0][1], "forward", m.stack.blocks[0][1].forward),
    "one norm over groups of images": lambda m: group_norms_(m.stack.blocks[0][1].residual[1:2], 2),
}


@pytest.mark.parametrize("what", NOT_COVERED)
def test_what_is_not_covered_goes_the_readable_way(what, passes):
    model = network().double()
    NOT_COVERED[what](model.double())
    model.double()
    twin = copy.deepcopy(model)
    y = one_step(model)
    with nullcontext() if what == "a parametrization" else reference():
        expected = one_step(twin)
    assert largest_difference(y, expected) < 1e-12
    assert_same(model, twin)
    assert passes == []


@pytest.mark.parametrize("options", [{"norm": "sum"}, {"aggregation": "mean"}, {"aggregation": "sum"}], ids=str)
def test_other_ways_to_join_branches_go_the_readable_way(options, passes):
    both_ways(network(**options), one_step)
    assert passes == []


def test_autocast_goes_the_readable_way(passes):
    model = network(dtype=torch.float32)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(X.float())
        with reference():
            expected = twin(X.float())
    assert torch.equal(found, expected)
    assert passes == []


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("name", ["learned", "a single source", "wide", "fixed at random"])
def test_norms_over_groups_of_images_agree(name, group, passes):
    model = network(**NETWORKS[name])
    group_norms_(model, group)
    both_ways(model, one_step)
    model.zero_grad()
    both_ways(model.eval(), one_step)
    assert passes == [True] * 2


def test_candidates_may_be_fewer(passes):
    model = network()
    wiring = [[[]] * 4, [[0, 1], [1, 2], [2, 3], [0, 3]], *([[0, 1, 2], [0, 2, 3], [1, 2, 3], [0, 1]],) * 4]
    stack = mc.MaskedStack(
        [list(layer) for layer in model.stack.blocks], 2, wiring=wiring, aggregation=model.stack.aggregation
    )
    model.stack = stack.double()
    both_ways(model, one_step)
    assert passes == [True]


def test_fan_ins_that_differ_within_a_module_go_the_readable_way(passes):
    model = network()
    counts = [1, 2, 3, 4] * 5
    model.stack = mc.MaskedStack(
        [list(layer) for layer in model.stack.blocks], counts, aggregation=model.stack.aggregation
    ).double()
    both_ways(model, one_step)
    assert passes == []


def test_one_pixel_of_one_image_is_torchs_own_error():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network()(X[:1, :, :4, :4])


def one_gradient(model):
    (grad,) = torch.autograd.grad(model(X).sum(), model.stem[0].weight)
    return grad


def test_a_graph_of_gradients_changes_no_gradient():
    model = network()
    twin = copy.deepcopy(model)
    (grad,) = torch.autograd.grad(model(X).sum(), model.stem[0].weight, create_graph=True)
    assert torch.equal(grad, one_gradient(twin))


def test_gradients_of_gradients_are_refused_but_in_the_readable_way():
    model = network()
    weight, plain = model.stem[0].weight, one_gradient(model)
    for by in (weight, model.stack.blocks[1][0].residual[0].weight, model.stack.masks.real):
        (grad,) = torch.autograd.grad(model(X).square().sum(), weight, create_graph=True)
        with pytest.raises(mc.ConnectivityError, match=r"mc\.reference"):
            torch.autograd.grad(grad.square().sum(), by)
    (grad,) = torch.autograd.grad(model(X).sum(), weight, create_graph=True)
    with pytest.raises(mc.ConnectivityError, match=r"mc\.reference"):
        grad.sum().backward()
    assert plain.isfinite().all()
    with reference():
        y = model(X)
    (grad,) = torch.autograd.grad(y.sum(), model.stem[0].weight, create_graph=True)
    grad.square().sum().backward()
    assert model.stem[0].weight.grad.isfinite().all()


def test_drawn_masks_with_norms_in_eval_mode_agree(passes):
    model = network()
    one_step(model)
    model.zero_grad()
    model.eval()
    model.stack.training = True
    both_ways(model, one_step)
    assert passes == [True] * 2


def test_a_resnext_can_save_memory():
    model = network()
    save_memory_(model)
    assert model.stack.aggregation.lean


@pytest.mark.parametrize("model", [mc.resnet(14, 7, 2), mc.resnext(11, 4, 2, 7, 1, norm="sum"), nn.Linear(1, 1)])
def test_a_network_without_wide_tensors_cannot(model):
    with pytest.raises(mc.ConfigError, match="this network has no wide tensors to recompute"):
        save_memory_(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_gradients_go_the_readable_way(passes):
    model = network(connectivity="random").eval()
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        found = torch.autograd.forward_ad.unpack_dual(model(x)).tangent
    assert found.isfinite().all()
    assert passes == []


def test_a_shortcut_that_does_not_fit_is_the_readable_paths_error(passes):
    model = network()
    model.stack.aggregation.shortcuts["2"].conv.stride = (1, 1)
    with pytest.raises(RuntimeError, match="must match"):
        model(X)
    assert passes == [False]


def test_it_holds_in_every_thread():
    with reference():
        threads = ThreadPoolExecutor(1)
        assert threads.submit(is_reference).result()
