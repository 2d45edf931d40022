"""Unused modules out, a plain network back, and the same function."""

import copy
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EncoderBlock, chain_by_hand, conv_blocks, mlp_blocks, mlp_layers
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import maskconnect as mc
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.pruning.prune import PrunedCount, difference, pruned_parameters

prune = partial(mc.prune, merge=False)
"""Exactly the modules of the model; test_merge.py has the rest."""

X = torch.linspace(-1, 1, 18).reshape(3, 6)
TAIL = [[], [0], [1], [2], [3], [0], [5], [6]]  # modules 1 to 4 read each other, and nothing else reads them


def images(count=2, size=16, channels=3):
    return torch.randn(count, channels, size, size, dtype=torch.float64)


def resnet(fan_in, seed=0):
    return mc.resnet(20, 10, fan_in, connectivity="random", seed=seed).double()


def resnext(fan_in, **options):
    return mc.resnext(20, 4, 4, 10, fan_in, connectivity="random", seed=3, **options).double()


def kept(module):
    """The names of the parts that are left."""
    return [name for name, _ in module.named_children()]


def size_of(model):
    return sum(p.numel() for p in model.parameters())


def assert_close(found, expected):
    """Equal except for the last digits: the same sums, perhaps in another order."""
    expected, allowed = expected.detach(), 1e-12 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=allowed * max(1, float(expected.abs().max())))


def assert_same(model, pruned, *inputs):
    for x in inputs:
        assert_close(pruned.eval()(x.clone()), model.eval()(x.clone()))


def assert_trains_alike(model, pruned, x, steps=2):
    """Outputs, gradients, weights and statistics stay equal over a few steps."""
    networks = model.train(), pruned.train()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1, momentum=0.9) for m in networks]
    for step in range(steps):
        outputs = []
        for network, optimizer in zip(networks, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            outputs.append(network(x.clone()))
            outputs[-1].square().mean().backward()
            optimizer.step()
        assert_close(*outputs)
    kept, everything = dict(pruned.named_parameters()), dict(model.named_parameters())
    for name, p in kept.items():
        assert_close(p.grad, everything[name].grad)
    assert sum(bool(p.grad.any()) for p in kept.values()) > len(kept) / 2
    state = model.state_dict()
    for name, value in pruned.state_dict().items():
        assert_close(value, state[name])


@pytest.mark.parametrize("fan_in", [1, 2, 5, 8])
def test_a_pruned_resnet_computes_the_same_for_inputs_of_every_size(fan_in):
    gone = 0
    for seed in range(4):
        model = resnet(fan_in, seed)
        model(images(8))  # statistics that are not those of the start
        pruned = prune(model, images())
        assert_same(
            model, pruned, *(images(count, size) for count, size in ((1, 16), (3, 32), (2, 30), (2, 17), (2, 8)))
        )
        gone += mc.count_parameters(model).weights - size_of(pruned)
    assert (gone == 0) == (fan_in == 8)


@pytest.mark.parametrize("options", [{"norm": "branch"}, {"norm": "sum"}, {"aggregation": "mean"}])
@pytest.mark.parametrize("fan_in", [1, 2, 4])
def test_a_pruned_resnext_computes_the_same(options, fan_in):
    model = resnext(fan_in, **options)
    model(images(8))
    pruned = prune(model, images())
    assert_same(model, pruned, images(), images(3, 20))
    if fan_in == 4:  # else a norm that branches share is called once for each, and pools nothing
        assert_trains_alike(model, pruned, images(4))
    assert (fan_in == 1) == (size_of(pruned) < pruned_parameters(model).weights)


def test_a_pruned_resnet_trains_as_the_frozen_one_does():
    model = resnet(2, seed=1)
    pruned = prune(model, images())
    assert_trains_alike(model, pruned, images(4))
    assert_same(model, pruned, images())


@st.composite
def wirings(draw, count=6):
    return [[], *(sorted(draw(st.sets(st.integers(0, j - 1), min_size=1, max_size=3))) for j in range(1, count))]


@given(wirings(), st.sampled_from(["mean", "sum"]))
@settings(max_examples=40, deadline=None)
def test_any_chain_of_any_resolutions_is_pruned_to_the_same_function(wiring, aggregation):
    stack = mc.MaskedStack(conv_blocks(), connectivity=wiring, aggregation=aggregation).double()
    pruned = prune(stack, images(size=8, channels=4))
    for size in (8, 16, 32):
        x = images(3, size, 4)
        assert_same(stack, pruned, x)
        torch.testing.assert_close(pruned(x), chain_by_hand(stack.blocks, wiring, x, aggregation == "mean"))
    assert size_of(pruned) == pruned_parameters(stack).transitive


def test_sources_are_aligned_to_a_module_that_went():
    blocks = conv_blocks()
    wiring = [[], [0], [1], [0], [1, 3], [3]]  # modules 2 and 4, which halve the resolution, are read by nothing
    stack = mc.MaskedStack(blocks, connectivity=wiring)
    pruned = prune(stack, torch.randn(2, 4, 8, 8))
    assert kept(pruned.blocks) == ["0", "3", "5"]
    for shape in ((2, 4, 8, 8), (1, 4, 32, 16), (5, 4, 64, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(pruned(x), chain_by_hand(blocks, wiring, x))


def test_long_chains_of_unused_modules_go_and_nothing_goes_where_all_are_used():
    for wiring, left in ((TAIL, [0, 5, 6, 7]), ([[], [0], [0, 1], [1, 2]], [0, 1, 2, 3])):
        blocks = [block.extend([nn.BatchNorm1d(6), nn.Dropout()]) for block in mlp_blocks(len(wiring))]
        stack = mc.MaskedStack(blocks, connectivity=wiring)
        pruned = prune(stack, X)
        assert list(map(int, kept(pruned.blocks))) == left
        assert torch.equal(pruned.eval()(X), stack.eval()(X)), "bitwise identical"
        assert_trains_alike(stack, pruned, X)


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_layers_lose_their_unused_branches(aggregation):
    wiring = [[[], [], []], [[0], [0, 2], [1]], [[0], [0], [0, 1]]]
    stack = mc.MaskedStack(mlp_layers(3, 3), connectivity=wiring, aggregation=aggregation)
    pruned = prune(stack, X)
    assert {layer: kept(members) for layer, members in pruned.blocks.named_children()} == {
        "0": ["0", "2"],
        "1": ["0", "1"],
        "2": ["0", "1", "2"],
    }
    assert_same(stack, pruned, X, torch.randn(7, 6))
    assert_trains_alike(stack, pruned, X)


class Weighted(nn.Module):
    """An aggregation with a weight of its own; the mask must be ones, in the precision of the network."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, sources, mask):
        assert mask.tolist() == [1.0] * len(sources)
        assert mask.dtype == sources[0].dtype
        return self.scale * sum(m * y for m, y in zip(mask, sources, strict=True))


@pytest.mark.parametrize("modules", [mlp_blocks(8), mlp_layers(4, 3)])
def test_an_aggregation_of_ones_own_is_kept_with_its_weights(modules):
    stack = mc.MaskedStack(modules, 2, connectivity="random", aggregation=Weighted()).double()
    pruned = prune(stack, X.double())
    assert_same(stack, pruned, X.double())
    assert_trains_alike(stack, pruned, X.double())
    assert pruned.aggregation.scale is not stack.aggregation.scale


def pooled(y, shape):
    """Alignment of a user: average pooling, and channels repeated."""
    return F.adaptive_avg_pool2d(y, shape[2:]).repeat(1, shape[1] // y.shape[1], 1, 1)


@pytest.mark.parametrize("wiring", [[[], [0], [1], [0, 1, 2], [1], [0, 3]], [[], [0], [1], [0, 1], [1], [0, 3]]])
def test_an_alignment_of_ones_own_is_asked_for_the_same_shapes(wiring):
    stack = mc.MaskedStack(conv_blocks(), connectivity=wiring, align=pooled).double()
    for example in (8, 9):
        pruned = prune(stack, images(2, example, 4))
        assert "4" not in kept(pruned.blocks), "to whose shape module 5 needs its sources aligned"
        assert_same(stack, pruned, *(images(3, size, 4) for size in (8, 12, 16, 19)))
    pruned = prune(stack, images(2, 4, 4))
    assert_same(stack, pruned, images(3, 4, 4))
    with pytest.raises(AssertionError, match="did not show how it is aligned at other lengths"):
        pruned(images(3, 8, 4))  # module 4 had 1 position, which any stride gives


def test_an_alignment_of_ones_own_to_lengths_that_no_stride_gives_is_right_or_an_error():
    blocks = [nn.Conv1d(2, 2, 3) for _ in range(4)]  # every one takes two positions away
    for last, right in (([0, 2], True), ([0], False)):  # whether module 2 stays, to whose shape module 0 is cut
        wiring = [[], [0], [0, 1], last]
        stack = mc.MaskedStack(blocks, connectivity=wiring, align=lambda y, shape: y[..., : shape[-1]])
        pruned = prune(stack, torch.randn(2, 2, 12))
        assert_same(stack, pruned, torch.randn(3, 2, 12))
        if right:
            assert_same(stack, pruned, torch.randn(3, 2, 40))
        else:
            with pytest.raises(AssertionError, match="axis 2 of an output had length 10 when the network was pruned"):
                pruned(torch.randn(3, 2, 40))


def test_an_alignment_of_ones_own_may_lead_to_other_axes():
    blocks = [nn.Conv2d(2, 2, 1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(2, 2)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0]], align=lambda y, shape: y.mean((2, 3)).reshape(shape))
    pruned = prune(stack, torch.randn(2, 2, 4, 4))
    assert_same(stack, pruned, torch.randn(5, 2, 8, 8))
    blocks = [nn.Linear(6, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 2, 1)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0]], align=lambda y, shape: y.reshape(shape))
    assert_same(stack, prune(stack, X), torch.randn(5, 6))


def test_features_without_positions_are_padded():
    blocks = [nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0], [0, 2]])
    assert_same(stack, prune(stack, X), X, torch.randn(1, 6))


@pytest.mark.parametrize("widths", [(4, 4, 4, 4), (4, 4, 4, 8)])
def test_an_example_that_is_too_small_to_show_a_stride_is_not_taken_for_larger_inputs(widths):
    channels = zip((4, *widths), widths, strict=False)
    blocks = [nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in channels]
    stack = mc.MaskedStack([*blocks, nn.Identity()], connectivity=[[], [0], [0], [2], [2]])
    pruned = prune(stack, torch.randn(1, 4, 2, 2))  # all outputs have 1 position
    assert_same(stack, pruned, torch.randn(3, 4, 2, 2))
    with pytest.raises(AssertionError, match=r"had length 1 when .* Prune with an example of this size"):
        pruned(torch.randn(3, 4, 16, 16))
    assert_same(stack, prune(stack, torch.randn(1, 4, 32, 32)), torch.randn(3, 4, 16, 16))


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.add_(1))


def test_a_module_that_changes_its_input_in_place_changes_it_for_nobody_else():
    chain = [InPlace(6, 6) for _ in range(5)], [[], [0], [0], [1, 2], [0]]
    layers = [[InPlace(6, 6) for _ in range(3)] for _ in range(3)], [[[], [], []], [[0], [2], [2]], [[0], [1], [1]]]
    for modules, wiring in (chain, layers):
        stack = mc.MaskedStack(modules, connectivity=wiring)
        pruned = prune(stack, X)
        assert_same(stack, pruned, X)
        assert_trains_alike(stack, pruned, X)


def test_a_lone_source_that_nobody_else_reads_is_passed_on_as_it_is():
    class Same(nn.Identity):
        def forward(self, x):
            self.pointer = x.data_ptr()
            return x

    pruned = prune(mc.MaskedStack([Same() for _ in range(4)], connectivity=[[], [0], [0], [2]]), X)
    pruned(X)
    pointers = {name: block.pointer for name, block in pruned.blocks.named_children()}
    assert pointers["0"] == X.data_ptr() == pointers["2"] == pointers["3"]


def test_outputs_that_nothing_reads_any_more_are_released():
    class Noted(nn.Identity):
        def forward(self, x):
            alive.append(sum(ref() is not None for ref in made))
            y = x + 1
            made.append(weakref.ref(y))
            return y

    made, alive = [], []
    pruned = prune(mc.MaskedStack([Noted() for _ in range(6)], connectivity=[[], [0], [1], [0, 2], [3], [4]]), X)
    made.clear(), alive.clear()
    pruned(X)
    assert alive == [0, 1, 2, 0, 1, 1]


def test_further_arguments_reach_every_module():
    stack = mc.MaskedStack([EncoderBlock() for _ in range(5)], 2, connectivity="random", seed=1)
    x, padding = torch.randn(3, 7, 16), torch.arange(7).repeat(3, 1) > 4
    pruned = prune(stack, x, key_padding_mask=padding)
    assert difference(stack, pruned, x, key_padding_mask=padding) == 0
    assert difference(stack, pruned, x, padding) == 0
    assert not torch.equal(pruned(x), pruned(x, padding))


class Two(nn.Module):
    """Two stacks, the second of layers, and one more inside of a module of the first."""

    def __init__(self):
        super().__init__()
        inner = mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [1], [0]])
        unused = mc.MaskedStack(mlp_blocks(3), connectivity="prev")
        self.first = mc.MaskedStack(
            [*mlp_blocks(2), inner, unused, *mlp_blocks(1)], connectivity=[[], [0], [1], [2], [2]]
        )
        self.second = mc.MaskedStack(mlp_layers(3, 3), 1, connectivity="random", seed=2)
        self.again = self.first

    def forward(self, x):
        return self.again(self.second(self.first(x)))


def test_several_stacks_are_pruned_also_inside_of_each_other():
    model = Two()
    pruned = prune(model, X)
    assert_same(model, pruned, X)
    assert_trains_alike(model, pruned, X)
    assert pruned.again is pruned.first
    assert kept(pruned.first.blocks) == ["0", "1", "2", "4"]
    assert kept(pruned.first.get_submodule("blocks.2").blocks) == ["0", "3"]
    assert pruned_parameters(model).transitive == size_of(pruned)


@pytest.mark.parametrize("make", [lambda: resnet(2), lambda: resnext(1), lambda: resnext(1, norm="sum")])
def test_what_is_left_is_plain_with_the_old_names_and_as_large_as_counted(make):
    model = make()
    pruned = prune(model, images())
    assert not any(isinstance(part, mc.MaskedStack | ConnectivityMasks) for part in pruned.modules())
    old, new = model.state_dict(), pruned.state_dict()
    assert new.keys() < old.keys()
    assert any(name.startswith("stack.blocks.8.") for name in new) or "stack.blocks.5.3.residual.0.weight" in new
    assert all(torch.equal(value, old[name]) for name, value in new.items())
    assert size_of(pruned) == pruned_parameters(model).transitive < mc.count_parameters(model).weights
    assert_same(model, pickle.loads(pickle.dumps(pruned)), images())


class RandomInEval(nn.Module):
    merged = False

    def forward(self, x):
        return F.dropout(x, training=True)

    def train(self, mode=True):
        self.merged = not mode  # as adapters do, whose weights are merged in eval mode
        return super().train(mode)


def test_the_model_the_example_and_random_numbers_stay_as_they_were():
    model = mc.resnet(20, 10, 2, connectivity="random")
    model.stem = nn.Sequential(nn.ReLU(inplace=True), RandomInEval(), *model.stem)
    model.stack.eval()
    model.stack.blocks[0].train()
    x = torch.randn(2, 3, 16, 16)
    example, state, draws = x.clone(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = {name: part.training for name, part in model.named_modules()}
    pruned = prune(model, x)
    difference(model, pruned, x)
    assert modes == {name: part.training for name, part in model.named_modules()}
    assert all(part.training == modes[name] for name, part in pruned.named_modules())
    assert not model.stem[1].merged
    assert not pruned.get_submodule("stem.1").merged
    assert torch.equal(x, example)
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in [*model.modules(), *pruned.modules()])
    nn.init.zeros_(pruned.classifier.weight)
    nn.init.zeros_(pruned.get_submodule("stack.blocks.0.residual.0").weight)
    assert model.classifier.weight.all()
    assert model.stack.blocks[0].residual[0].weight.all()


def test_counts_by_hand():
    stack = mc.MaskedStack(mlp_blocks(8), connectivity=TAIL)
    assert pruned_parameters(stack) == PrunedCount(weights=8 * 42, one_step=7 * 42, transitive=4 * 42)
    layers = mc.MaskedStack(mlp_layers(3, 2), connectivity=[[[], []], [[0], [1]], [[0], [0]]])
    assert pruned_parameters(layers) == PrunedCount(weights=6 * 42, one_step=5 * 42, transitive=4 * 42)
    assert pruned_parameters(nn.Linear(2, 3)) == PrunedCount(9, 9, 9)


def test_counts_follow_the_present_top_k_while_masks_are_learned():
    stack = mc.MaskedStack(mlp_blocks(3), fan_in=1)
    assert pruned_parameters(stack) == PrunedCount(3 * 42, 3 * 42, 3 * 42)
    with torch.no_grad():
        stack.masks.real[1] = torch.tensor([0.9, 0.1])
    assert pruned_parameters(stack) == PrunedCount(3 * 42, 2 * 42, 2 * 42)


def test_a_weight_that_something_else_uses_too_stays_and_counts_once():
    blocks = mlp_blocks(4)
    blocks[1][0].weight = blocks[3][0].weight
    blocks[2] = blocks[0]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0], [0, 2]])
    assert pruned_parameters(stack) == PrunedCount(42 + 42 + 6, 42 + 42, 42 + 42)
    assert size_of(prune(stack, X)) == 42 + 42
    assert_same(stack, prune(stack, X), X)


def test_a_pruned_network_compiles_whole_and_is_exported_for_inputs_of_every_size():
    model = mc.MaskedStack(conv_blocks(), connectivity=[[], [0], [1], [0, 1], [3], [1, 3]]).eval()
    x, other = torch.randn(2, 4, 16, 16), torch.randn(3, 4, 24, 20)
    pruned = prune(model, x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(pruned, backend="aot_eager", fullgraph=True)(x), model(x))
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(pruned, (x,), dynamic_shapes=({0: free, 2: free, 3: free},))
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize(
    ("dtype", "enough", "too_much"),
    [(torch.float64, 1e-13, 1e-11), (torch.float32, 1e-6, 1e-4), (torch.bfloat16, 0.004, 0.1)],
)
def test_a_network_that_comes_out_different_is_an_error_that_says_by_how_much(dtype, enough, too_much):
    stack = mc.MaskedStack(mlp_blocks(4), connectivity="prev").to(dtype)
    factor = 1 + enough
    stack.register_forward_hook(lambda module, args, y: y * factor)  # which the pruned network has not
    prune(stack, X.to(dtype))
    factor = 1 + too_much
    with pytest.raises(mc.ConnectivityError, match=r"differs from the model by (1\.0e-11|1\.0e-04|9\..e-02) of the"):
        prune(stack, X.to(dtype))


def test_difference_is_relative_and_sees_what_is_not_finite():
    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return {"y": x * self.factor}

    x = torch.tensor([0.0, 1.0, -4.0])
    assert difference(Times(2), Times(2), x) == 0
    assert difference(Times(2), Times(3), x) == 0.5
    assert difference(Times(2), Times(math.nan), x) == math.inf
    assert difference(Times(0), Times(2), x) == math.inf
    assert difference(Times(math.nan), Times(math.nan), x) == 0
    assert difference(Times(2), Times(torch.ones(2, 3)), x) == math.inf


def test_what_cannot_be_pruned_is_refused():
    with pytest.raises(mc.ConnectivityError, match=r"freeze it first: mc.freeze\(model\)"):
        prune(mc.MaskedStack(mlp_blocks(4), 2), X)
    with pytest.raises(mc.ConfigError, match="there is no MaskedStack in this Linear"):
        prune(nn.Linear(6, 6), X)
    with pytest.raises(mc.ConfigError, match=r"pass an example input: mc\.prune\(model, x\)"):
        prune(mc.MaskedStack(mlp_blocks(4), connectivity="prev"))
    idle = nn.Linear(6, 6)
    idle.stack = mc.MaskedStack(mlp_blocks(4), connectivity="prev")
    with pytest.raises(mc.ConnectivityError, match="the stack 'stack' did not run; pass an example"):
        prune(idle, X)


def test_a_stack_that_runs_on_shapes_that_are_aligned_differently_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [nn.MaxPool2d(2, ceil_mode=True), nn.Identity(), nn.AdaptiveAvgPool2d(4), nn.Identity()]
            self.stack = mc.MaskedStack(blocks, connectivity=[[], [0], [1], [0, 2]])

        def forward(self, x):
            return self.stack(x) + self.stack(x[:, :, ::2, ::2])

    with pytest.raises(mc.ConnectivityError, match="ran 2 times, with different arguments or shapes"):
        prune(Twice(), images())


@pytest.mark.parametrize(
    "make",
    [lambda blocks: mc.MaskedStack(blocks, 1), lambda blocks: mc.rewire(nn.Sequential(nn.Sequential(*blocks)), "0", 1)],
    ids=["built", "rewired"],
)
def test_an_example_that_the_model_rejects_is_an_error_that_names_the_error_of_the_model(make):
    model = make(mlp_blocks(4))
    mc.freeze(model)
    with pytest.raises(
        mc.ConfigError, match=r"rejects the example \(RuntimeError: mat1 and mat2 .* pass an input"
    ) as told:
        mc.prune(model, torch.ones(3, 7))
    assert isinstance(told.value.__cause__, RuntimeError)


def test_an_error_of_ours_on_an_example_stays_as_it_is():
    class Strict(nn.Linear):
        def forward(self, x):
            raise mc.ConnectivityError("as it is")

    with pytest.raises(mc.ConnectivityError, match=r"^as it is$"):
        prune(mc.MaskedStack([Strict(6, 6), nn.Linear(6, 6)], connectivity="prev"), X)


def test_a_distributed_model_is_pruned_without_its_wrapper(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(mc.MaskedStack(mlp_blocks(4), connectivity="prev"))
        with pytest.raises(mc.ConfigError, match=r"call mc.prune\(model.module, ...\)"):
            prune(model, X)
        assert_same(model.module, prune(model.module, X), X)
    finally:
        torch.distributed.destroy_process_group()


def test_an_alignment_that_is_a_module_keeps_its_weights():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Conv2d(4, 8, 1, stride=2)

        def forward(self, y, shape):
            return self.project(y)

    blocks = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0, 1]], align=Projected())
    pruned = prune(stack, torch.randn(2, 4, 8, 8))
    assert {name for name, _ in pruned.named_parameters()} >= {"align.project.weight"}
    assert_same(stack.double(), pruned.double(), images(3, 16, 4))


class Scaled(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, a=1.0, *, b=(1, 2)):
        return self.linear(x) * a


class ScaledMore(Scaled):
    def forward(self, x, a=5.0, *, b=(1, 2)):
        return super().forward(x, a)


def test_defaults_are_those_that_all_modules_have():
    alike = mc.MaskedStack([Scaled(), Scaled()], connectivity="prev")
    pruned = prune(alike, X, 3.0)
    assert torch.equal(pruned(X), alike(X))
    assert torch.equal(pruned(X, a=2.0), alike(X, 2.0))
    pruned = prune(mc.MaskedStack([Scaled(), ScaledMore()], connectivity="prev"), X, 3.0)
    with pytest.raises(TypeError, match="'a'"):
        pruned(X)
    stack = mc.MaskedStack([Scaled(), Scaled()], connectivity="prev")
    pruned = prune(stack, X, 3.0, b=(2, 3))  # b has no default that a graph can hold, so a has none either
    assert torch.equal(pruned(X, 2.0, b=(1, 1)), stack(X, 2.0))


def test_functions_without_a_name_or_a_source_are_called_too():
    made = {}
    exec("f = lambda sources, mask: sum(sources)", made)
    for aggregation in (made["f"], partial(made["f"]), Weighted().forward):
        stack = mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [0, 1], [1, 2]], aggregation=aggregation)
        assert_same(stack, prune(stack, X), X)


@pytest.mark.parametrize(
    ("halve", "example", "other"),
    [(lambda: nn.MaxPool2d(2), 8, 3), (lambda: nn.Conv2d(4, 4, 3, 3, 1), 12, 9)],
    ids=["rounded down", "a stride of three"],
)
def test_an_input_whose_sources_are_aligned_otherwise_than_the_examples_is_an_error(halve, example, other):
    stack = mc.MaskedStack([nn.Conv2d(4, 4, 1), halve(), nn.Conv2d(4, 4, 1)], connectivity=[[], [0], [0, 1]]).double()
    pruned = prune(stack, images(2, example, 4))
    assert_same(stack, pruned, images(3, example, 4))
    with pytest.raises(AssertionError, match="Prune with an example of this size"):
        pruned(images(2, other, 4))


def test_a_module_in_place_after_others_have_read_changes_nothing_for_them():
    conv = partial(nn.Conv2d, 4, 4, 3, padding=1)
    late = [conv(), conv(), nn.Sequential(nn.ReLU(inplace=True), conv()), conv()]
    stack = mc.MaskedStack(late, connectivity=[[], [0], [0], [1, 2]], aggregation="sum").double()
    inner = mc.MaskedStack([nn.ReLU(inplace=True), conv()], connectivity="prev")
    outer = mc.MaskedStack([conv(), inner, conv()], connectivity=[[], [0], [0, 1]]).double()
    for model in (stack, outer):
        for merge in (False, True):
            assert_same(model, mc.prune(model, images(2, 8, 4), merge=merge), images(3, 8, 4))


def test_a_module_that_another_one_of_the_stack_calls_too():
    class Calls(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = other

        def forward(self, x):
            return self.other(x) + 1

    shared = nn.Conv2d(4, 4, 3, 2, 1)
    stack = mc.MaskedStack(
        [nn.Conv2d(4, 4, 1), Calls(shared), nn.Conv2d(4, 4, 1)], connectivity=[[], [0], [0, 1]]
    ).double()
    both = mc.MaskedStack(
        [shared.double(), Calls(nn.Sequential(shared)), nn.Conv2d(4, 4, 1).double()], connectivity=[[], [0], [0, 1]]
    )
    for model in (stack, both):
        assert_same(model, prune(model, images(2, 16, 4)), images(3, 16, 4))


def test_a_network_pruned_in_half_precision_can_be_widened():
    stack = mc.MaskedStack([nn.Tanh() for _ in range(4)], connectivity=[[], [0], [0, 1], [0, 1, 2]])
    pruned = prune(stack, X.half())
    assert pruned(X.half()).dtype == torch.float16
    assert torch.equal(pruned(X), stack(X))
    assert torch.equal(pruned(X.double()), stack(X.double()))
