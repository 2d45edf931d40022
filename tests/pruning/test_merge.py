"""Folding, merging and shared sums change how a pruned network computes, and not what."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import conv_blocks, mlp_blocks
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.pruning.prune import difference

FAMILIES = {
    "resnet K=1": lambda: mc.resnet(20, 10, 1, connectivity="random", seed=2),
    "resnet K=4": lambda: mc.resnet(20, 10, 4, connectivity="random", seed=2),
    "resnet prev": lambda: mc.resnet(20, 10, connectivity="prev"),
    "resnet full sum": lambda: mc.resnet(14, 10, connectivity="full", aggregation="sum"),
    "resnet imagenet": lambda: mc.resnet(50, 10, 3, connectivity="random", stem="imagenet"),
    "resnext K=1": lambda: mc.resnext(20, 4, 4, 10, 1, connectivity="random", seed=3),
    "resnext K=2": lambda: mc.resnext(20, 4, 4, 10, 2, connectivity="random", seed=3),
    "resnext K=C": lambda: mc.resnext(20, 4, 4, 10, connectivity="full"),
    "resnext K=1 sum": lambda: mc.resnext(20, 4, 4, 10, 1, connectivity="random", norm="sum"),
    "resnext K=2 sum": lambda: mc.resnext(20, 4, 4, 10, 2, connectivity="random", norm="sum"),
    "resnext K=C sum": lambda: mc.resnext(20, 4, 4, 10, connectivity="full", norm="sum"),
    "resnext mean": lambda: mc.resnext(20, 4, 4, 10, 2, connectivity="random", aggregation="mean"),
    "resnext blocks summed": lambda: mc.resnext(11, 4, 4, 10, 2, connectivity="random", aggregation="sum"),
    "resnext mini": lambda: mc.resnext(11, 4, 4, 10, 2, connectivity="random", stem="mini"),
}


def images(count=2, size=32, dtype=torch.float64):
    return torch.randn(count, 3, size, size, dtype=dtype)


def trained(make, dtype=torch.float64):
    """A network whose batch norms are not those of the start."""
    torch.manual_seed(0)
    model = make().to(dtype)
    model(images(8, dtype=dtype))
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return model.eval()


def count(network, kind):
    return sum(isinstance(part, kind) for part in network.modules())


def calls(network, *targets):
    return sum(node.op == "call_function" and node.target in targets for node in network.graph.nodes)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same_in_every_form(name, fold, merge):
    model = trained(FAMILIES[name])
    side = 64 if name.endswith(("imagenet", "mini")) else 32  # else the last outputs have one position
    pruned = mc.prune(model, images(2, side), fold=fold, merge=merge)
    allowed = 1e-12 if not (fold or merge) else 1e-11
    for x in (images(1, side), images(3, side + 32)):
        assert difference(model, pruned, x) <= allowed
    assert not [part for part in pruned.modules() if type(part).__module__.startswith("maskconnect")]
    assert not [node for node in pruned.graph.nodes if "maskconnect" in getattr(node.target, "__module__", "") or ""]
    # The published ResNeXt has a batch norm over a sum of branches: over one convolution only where that is merged.
    if fold and "sum" not in name.split():
        assert count(pruned, nn.BatchNorm2d) == 0
    single = trained(FAMILIES[name], torch.float32)
    x = images(2, side, torch.float32)
    assert difference(single, mc.prune(single, x, fold=fold, merge=merge), x) <= (1e-4 if fold or merge else 1e-5)


def test_a_network_of_all_branches_becomes_the_published_resnext():
    for norm in ("branch", "sum"):
        model = trained(lambda norm=norm: mc.resnext(20, 4, 4, 10, connectivity="full", norm=norm))
        pruned = mc.prune(model, images(), fold=True)
        convs = [part for part in pruned.modules() if isinstance(part, nn.Conv2d)]
        assert [c.groups for c in convs if c.kernel_size == (3, 3)] == [1, 4, 4, 4, 4, 4, 4]
        wide = [(c.in_channels, c.out_channels) for c in convs if c.kernel_size == (1, 1) and c.stride == (1, 1)]
        assert (64, 16) in wide, "one convolution reduces for all branches"
        assert (16, 64) in wide, "and one expands for all"
        # Six modules of three, the stem, and three shortcuts; where all is linear, one of these joins a sum.
        assert len(convs) == 1 + 6 * 3 + 3 - (norm == "branch")
        assert calls(pruned, torch.narrow) == 0


def test_branches_that_read_the_same_share_a_convolution_and_others_do_not():
    layers = [[nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)) for _ in range(3)]] * 2
    layers = [layers[0], [nn.Sequential(*map(type_like, branch)) for branch in layers[0]]]
    wiring = [[[], [], []], [[0], [0], [1, 2]]]
    stack = mc.MaskedStack(layers, connectivity=wiring, aggregation="sum").double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pruned = mc.prune(stack, x)
    assert difference(stack, pruned, x) < 1e-12
    found = [(c.in_channels, c.out_channels, c.groups) for c in pruned.modules() if isinstance(c, nn.Conv2d)]
    assert sorted(found) == sorted(
        [
            (3, 4, 1),  # branch 0 of the first layer
            (4, 3, 1),
            (3, 8, 1),  # its branches 1 and 2, which are read as a sum alone
            (8, 3, 1),
            (3, 8, 1),  # branches 0 and 1 of the second read branch 0
            (3, 4, 1),  # branch 2 reads a sum
            (12, 3, 1),  # and all are summed
        ]
    )
    assert calls(pruned, torch.narrow) == 0


def type_like(module):
    """A new module like this one."""
    if isinstance(module, nn.Conv2d):
        return nn.Conv2d(module.in_channels, module.out_channels, module.kernel_size, padding=module.padding)
    return type(module)()


def test_a_single_source_costs_no_arithmetic():
    pruned = mc.prune(trained(FAMILIES["resnet prev"]), images(), fold=True)
    assert calls(pruned, operator.iadd) == 9, "the shortcut of each block"
    assert calls(pruned, operator.add, operator.truediv, operator.itruediv, torch.add) == 0
    assert not [node for node in pruned.graph.nodes if node.op == "call_method" and node.target == "clone"]


@st.composite
def wirings(draw, count=6):
    return [[], *(sorted(draw(st.sets(st.integers(0, j - 1), min_size=1, max_size=4))) for j in range(1, count))]


@given(wirings(), st.sampled_from(["mean", "sum"]))
@settings(max_examples=60, deadline=None)
def test_sums_that_are_shared_and_padded_once_are_the_same_sums_with_no_more_additions(wiring, aggregation):
    stack = mc.MaskedStack(conv_blocks(), connectivity=wiring, aggregation=aggregation).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    networks = [mc.prune(stack, x, merge=merge) for merge in (False, True)]
    for size in (8, 16):
        x = torch.randn(3, 4, size, size, dtype=torch.float64)
        assert difference(stack, networks[1], x) < 1e-12
    additions = [calls(network, operator.add, operator.iadd) for network in networks]
    assert additions[1] <= additions[0]


def test_what_several_sums_have_in_common_is_added_once():
    wiring = [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    stack = mc.MaskedStack(mlp_blocks(6), connectivity=wiring, aggregation="sum")
    x = torch.randn(3, 6)
    assert calls(mc.prune(stack, x, merge=False), operator.add) == 1 + 2 + 3 + 4
    assert calls(mc.prune(stack, x), operator.add, operator.iadd) == 4


def test_a_network_can_be_run_again_and_trained_although_it_writes_over_its_own_tensors():
    for name in ("resnet K=4", "resnext K=2", "resnext K=C"):
        model = trained(FAMILIES[name])
        plain = mc.prune(model, images(), merge=False)
        for fold in (False, True):
            pruned = mc.prune(model, images(), fold=fold)
            x = images(3)
            given_x = x.clone().requires_grad_()
            first = pruned(given_x)
            first.square().sum().backward()
            torch.testing.assert_close(pruned(x), first, rtol=0, atol=0)
            expected = x.clone().requires_grad_()
            plain(expected).square().sum().backward()
            torch.testing.assert_close(given_x.grad, expected.grad, rtol=1e-9, atol=1e-9 * float(expected.grad.max()))
            assert all(p.grad is not None for p in pruned.parameters())


def test_a_merged_network_trains_as_the_frozen_one_does():
    branches = [
        [
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1, bias=False))
            for _ in range(3)
        ]
        for _ in range(2)
    ]
    stack = mc.MaskedStack(branches, connectivity=[[[], [], []], [[0], [0], [1, 2]]], aggregation="sum").double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    networks = stack, mc.prune(stack, x), mc.prune(stack, x, merge=False)
    for network in networks:
        network.train()
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.05, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    assert count(networks[1], nn.BatchNorm2d) < count(networks[2], nn.BatchNorm2d)
    assert difference(networks[0], networks[1], x) < 1e-10


class Two(nn.Module):
    """Reads its input twice, so that nothing can be folded into what made it."""

    def forward(self, x):
        return x.relu() + x


def folded(*blocks, x=None):
    stack = mc.MaskedStack([nn.Sequential(*blocks)], connectivity=[[]]).double().eval()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64) if x is None else x
    stack.train()(x)
    stack.eval()
    pruned = mc.prune(stack, x, fold=True)
    assert difference(stack, pruned, x + 1) < 1e-11
    return count(pruned, nn.modules.batchnorm._BatchNorm)


def test_norms_are_folded_where_they_follow_one_layer_and_stay_elsewhere():
    conv, norm = lambda: nn.Conv2d(3, 3, 3), lambda: nn.BatchNorm2d(3)
    assert folded(conv(), norm(), nn.ReLU(), conv(), norm()) == 0
    assert folded(norm(), conv()) == 1, "a norm before"
    assert folded(conv(), nn.ReLU(), norm()) == 1, "something between"
    assert folded(conv(), nn.BatchNorm2d(3, track_running_stats=False)) == 1, "no statistics"
    assert folded(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6, affine=False)) == 0
    shared = norm()
    assert folded(conv(), shared, conv(), shared) == 1, "one norm after two layers"
    weighted = torch.nn.utils.parametrizations.weight_norm(conv())
    assert folded(weighted, norm()) == 1, "weights that are computed"
    hooked = conv()
    hooked.register_forward_hook(lambda module, args, y: y * 2)
    assert folded(hooked, norm()) == 1, "somebody changes what comes between"
    flat = torch.randn(4, 3, dtype=torch.float64)
    assert folded(nn.Linear(3, 5), nn.BatchNorm1d(5), x=flat) == 1, "which of three axes it would be over is not known"
    assert folded(nn.Conv1d(3, 5, 1), nn.BatchNorm1d(5), x=flat[:, :, None].repeat(1, 1, 4)) == 0


def test_convolutions_of_different_kinds_that_read_the_same_stay_apart():
    def branch(conv):
        return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1))

    same = nn.Conv2d(3, 4, 1)
    kinds = {
        "alike": ([nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)], 1),
        "widths": ([nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3)], 2),
        "bias": ([nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 4, 1)], 2),
        "dilation": ([nn.Conv2d(3, 4, 3, dilation=2), nn.Conv2d(3, 4, 3)], 2),
        "mode": ([nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(3, 4, 3, padding=1)], 2),
        "reflect": ([nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect") for _ in range(2)], 1),
        "grouped": ([nn.Conv2d(3, 6, 1, groups=3), nn.Conv2d(3, 6, 1, groups=3)], 2),
        "one twice": ([same, same], 1),
    }
    for name, (convs, left) in kinds.items():
        stack = mc.MaskedStack([[branch(conv) for conv in convs]], connectivity=[[[], []]], aggregation="sum").double()
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        pruned = mc.prune(stack, x, fold=True)
        assert difference(stack, pruned, x + 1) < 1e-12, name
        assert count(pruned, nn.Conv2d) == left, name


def test_a_network_that_differs_on_other_inputs_than_the_example_is_an_error():
    x = torch.randn(3, 6)
    stack = mc.MaskedStack(mlp_blocks(4), connectivity="prev")
    hook = lambda module, args, y: y if torch.equal(args[0], x) else y * 1.01  # noqa: E731
    stack.register_forward_hook(hook)  # the pruned network has no hook
    with pytest.raises(mc.ConnectivityError, match=r"on a random input the pruned network differs .* by 9\.9e-03"):
        mc.prune(stack, x)


def test_a_model_that_takes_no_random_numbers_is_compared_on_the_example():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = mc.MaskedStack(mlp_blocks(3), connectivity="prev")

        def forward(self, x, lengths):
            if x.min() < 0:
                raise ValueError("negative")
            return self.stack(x)[:, : lengths[0]]

    x = torch.rand(3, 6)
    mc.prune(Picky(), x, torch.tensor([2, 3]))
    with pytest.raises(mc.ConfigError, match=r"the model rejects the example \(ValueError: negative\)"):
        mc.prune(Picky(), -x, torch.tensor([2, 3]))


def test_the_model_is_untouched_by_folding_and_merging():
    model = trained(FAMILIES["resnext K=2"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images()
    kept = x.clone()
    pruned = mc.prune(model, x, fold=True)
    with torch.no_grad():
        for p in pruned.parameters():
            p.zero_()
    assert torch.equal(x, kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_networks_of_stacks_in_stacks_and_of_ones_own_modules_are_folded_and_merged_too():
    class Block(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return F.relu(self.inner(x)) + x

    def conv():
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())

    inner = mc.MaskedStack([conv() for _ in range(4)], connectivity=[[], [0], [0], [1, 2]])
    model = nn.Sequential(
        mc.MaskedStack([conv(), Block(inner), conv(), conv()], connectivity=[[], [0], [1], [0, 1]]),
        nn.Flatten(),
        nn.Linear(3 * 64, 5),
    ).double()
    model(torch.randn(8, 3, 8, 8, dtype=torch.float64))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pruned = mc.prune(model, x, fold=True)
    assert difference(model, pruned, x + 1) < 1e-11
    assert count(pruned, nn.BatchNorm2d) == 0
    assert count(pruned, nn.Conv2d) == 1 + 3 + 1, "module 2 is dead, and two of the inner ones read the same"


def test_half_precision_sums_do_not_overflow():
    class Large(nn.Module):
        def forward(self, x):
            return x * 0 + 40_000

    stack = mc.MaskedStack([Large(), Large(), Large(), nn.Identity()], connectivity=[[], [0], [1], [0, 1, 2]])
    x = torch.zeros(2, 3, dtype=torch.float16)
    assert mc.prune(stack, x)(x).eq(40_000).all()


def test_graphs_of_the_users_own_are_called_as_they_are():
    def own():
        return torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))

    stack = mc.MaskedStack([own() for _ in range(3)], connectivity=[[], [0], [0, 1]]).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pruned = mc.prune(stack, x, fold=True)
    assert difference(stack, pruned, x) < 1e-12
    assert count(pruned, nn.BatchNorm2d) == 3


def test_an_identity_that_somebody_hooks_into_stays():
    watched, seen = nn.Identity(), []
    watched.register_forward_hook(lambda module, args, y: seen.append(1) or y * 2)
    stack = mc.MaskedStack([nn.Sequential(nn.Linear(6, 6), watched), nn.Identity()], connectivity="prev")
    x = torch.randn(3, 6)
    pruned = mc.prune(stack, x)
    seen.clear()
    assert torch.equal(pruned(x), stack(x))
    assert len(seen) == 2


def test_merged_convolutions_before_different_activations_in_place_can_be_trained():
    def branch(slope):
        return nn.Sequential(
            nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(slope, inplace=True), nn.Conv2d(3, 3, 1)
        )

    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    two = mc.MaskedStack([[branch(0.1), branch(0.2)], [nn.Identity()]], connectivity=[[[], []], [[0, 1]]]).double()
    pruned = mc.prune(two, x)
    assert calls(pruned, torch.narrow) == 2
    assert difference(two, pruned, x) < 1e-12
    pruned.train()(x).sum().backward()


def test_outputs_keep_the_precision_that_the_model_gives_them_under_autocast():
    class Wide(nn.Module):
        def forward(self, x):
            return x.float() * 1.0009765

    class Same(nn.Module):
        def forward(self, x):
            return x

    conv = nn.Conv2d(4, 4, 3, padding=1)
    stack = mc.MaskedStack([Wide(), conv, Same()], connectivity=[[], [0], [0, 1]], aggregation="sum").eval()
    x = torch.randn(2, 4, 8, 8)
    pruned = mc.prune(stack, x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = stack(x), pruned(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_what_somebody_keeps_of_a_module_is_not_written_over():
    kept = []
    convs = [nn.Conv2d(4, 4, 1) for _ in range(3)]
    convs[1].register_forward_hook(lambda module, args, y: kept.append((y, y.clone())))
    stack = mc.MaskedStack([*convs, nn.Identity()], connectivity=[[], [0], [0], [1, 2]], aggregation="sum")
    x = torch.randn(2, 4, 8, 8)
    pruned = mc.prune(stack, x)
    kept.clear()
    pruned(x)
    assert torch.equal(*kept[0])


def test_summed_convolutions_that_read_other_sizes_stay_apart():
    def strided():
        return nn.Conv2d(4, 4, 3, 2, 1)

    layers = [
        [nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)],
        [nn.Sequential(nn.MaxPool2d(2, 1), strided()), strided()],
    ]
    stack = mc.MaskedStack(layers, connectivity="full", aggregation="sum").double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    assert difference(stack, mc.prune(stack, x), x + 1) < 1e-12


def test_images_without_a_batch_are_read_too():
    layers = [[nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(3)] for _ in range(2)]
    wiring = [[[], [], []], [[0], [0], [1, 2]]]
    stack = mc.MaskedStack(layers, connectivity=wiring, aggregation="sum").double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    for example in (x, x[0]):
        pruned = mc.prune(stack, example)
        assert count(pruned, nn.Conv2d) < 12
        assert difference(stack, pruned, x[1]) < 1e-12


def test_a_norm_over_another_axis_and_a_forward_of_somebodys_own_are_not_folded():
    sequences = mc.MaskedStack(
        [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)], connectivity="prev"
    ).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    assert difference(sequences, mc.prune(sequences, x, fold=True), x + 1) < 1e-12
    conv = nn.Conv2d(3, 3, 1)
    conv.forward = lambda x: x * 2
    stack = mc.MaskedStack([nn.Sequential(conv, nn.BatchNorm2d(3))], connectivity=[[]]).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert difference(stack, mc.prune(stack, x, fold=True), x + 1) < 1e-12


def test_what_is_merged_does_not_depend_on_what_is_being_trained():
    def stack(frozen):
        torch.manual_seed(0)
        layers = [[nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)]]
        model = mc.MaskedStack(layers, connectivity=[[[], [], []]], aggregation="sum")
        if frozen:
            model.blocks[0][1].requires_grad_(False).eval()
        return model

    x = torch.randn(2, 3, 8, 8)
    one, other = (mc.prune(stack(frozen), x) for frozen in (False, True))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert count(other, nn.Conv2d) == 1
    assert all(p.requires_grad for p in other.parameters())


def test_a_shared_sum_is_copied_for_a_module_that_writes_over_its_input():
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(5)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0, 1], [0, 1], [0, 1, 3]], aggregation="sum").eval()
    x = torch.randn(4, 6)
    torch.testing.assert_close(mc.prune(stack, x)(x.clone()), stack(x.clone()))
