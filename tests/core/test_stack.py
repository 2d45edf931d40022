"""Any modules, run through masks."""

import pytest
import torch
from networks import chain_by_hand, conv_blocks, mlp_blocks, mlp_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

import maskconnect as mc

X = torch.linspace(-1, 1, 18).reshape(3, 6)


class Counting(nn.Module):
    """Counts how often it runs, and in which mode."""

    def __init__(self, block):
        super().__init__()
        self.block, self.runs = block, []

    def forward(self, x):
        self.runs.append(self.training)
        return self.block(x)


def test_random_connectivity_is_fixed_seeded_and_never_drawn_again():
    stack = mc.MaskedStack(mlp_blocks(8), 3, connectivity="random", seed=1)
    wiring = mc.wiring_of(stack)
    assert [len(row) for row in wiring] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert torch.equal(stack(X), stack(X))
    assert wiring == mc.wiring_of(mc.MaskedStack(mlp_blocks(8), 3, connectivity="random", seed=1))
    assert wiring != mc.wiring_of(mc.MaskedStack(mlp_blocks(8), 3, connectivity="random", seed=2))


def test_full_connectivity_reads_all_candidates_and_needs_no_fan_in():
    assert mc.wiring_of(mc.MaskedStack(mlp_blocks(4), connectivity="full")) == [[], [0], [0, 1], [0, 1, 2]]
    layered = mc.MaskedStack(mlp_layers(2, 3), connectivity="full")
    assert mc.wiring_of(layered) == [[[], [], []], [[0, 1, 2]] * 3]


def test_prev_of_layers_is_parallel_chains():
    assert mc.wiring_of(mc.MaskedStack(mlp_layers(3, 2), connectivity="prev")) == [[[], []], [[0], [1]], [[0], [1]]]


def test_candidates_can_be_given_explicitly():
    wiring = [[], [0], [0], [0, 2], [1, 3]]
    stack = mc.MaskedStack(mlp_blocks(5), 1, wiring=wiring)
    for _ in range(30):
        stack(X)
        for row, allowed in zip(stack.masks.binary, wiring[1:], strict=True):
            assert set(row.nonzero().flatten().tolist()) <= set(range(len(allowed)))
    assert stack.masks.source.tolist() == [[0, -1], [0, -1], [0, 2], [1, 3]]


def test_candidates_of_branches_can_be_given_explicitly():
    stack = mc.MaskedStack(mlp_layers(2, 3), 1, wiring=[[[], [], []], [[0], [1, 2], [2]]])
    assert mc.wiring_of(stack) == [[[], [], []], [[0], [1], [2]]]


def test_one_module_alone_is_that_module():
    (block,) = mlp_blocks(1)
    stack = mc.MaskedStack([block], fan_in=3)
    assert torch.equal(stack(X), block(X))
    assert mc.wiring_of(stack) == [[]]


def test_one_layer_alone_is_the_aggregate_of_its_branches():
    (layer,) = mlp_layers(1, 3)
    stack = mc.MaskedStack([layer], fan_in=2)
    torch.testing.assert_close(stack(X), sum(branch(X) for branch in layer) / 3)


def test_extra_arguments_go_to_every_module():
    class Shifted(nn.Module):
        def forward(self, x, shift, *, scale):
            return x * scale + shift

    stack = mc.MaskedStack([Shifted() for _ in range(3)], connectivity="prev")
    assert torch.equal(stack(X, 1.0, scale=2.0), ((X * 2 + 1) * 2 + 1) * 2 + 1)


def test_modules_may_return_anything_that_the_aggregation_understands():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu(), x

    def add(sources, mask):
        return sum(m * (residual + shortcut) for m, (residual, shortcut) in zip(mask, sources, strict=True))

    stack = mc.MaskedStack([[Pair(6, 6) for _ in range(3)] for _ in range(3)], 2, aggregation=add)
    stack(X).sum().backward()
    assert stack.masks.real.grad.abs().sum(dim=1).all()
    mc.freeze(stack)
    assert stack(X).shape == X.shape


def test_an_aggregation_with_weights_of_its_own_is_part_of_the_network():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, sources, mask):
            return self.scale * sum(m * y for m, y in zip(mask, sources, strict=True))

    stack = mc.MaskedStack(mlp_blocks(4), 2, aggregation=Scaled())
    stack(X).sum().backward()
    assert dict(stack.named_parameters())["aggregation.scale"].grad != 0


def test_while_learning_every_module_runs_and_afterwards_only_those_that_reach_the_output():
    blocks = [Counting(block) for block in mlp_blocks(5)]
    stack = mc.MaskedStack(blocks, fan_in=1)
    for _ in range(10):
        stack(X)
    assert [len(block.runs) for block in blocks] == [10] * 5
    with torch.no_grad():
        stack.masks.real.copy_(torch.eye(4))  # target j reads source j - 1, except for the last:
        stack.masks.real[3] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    mc.freeze(stack)
    for block in blocks:
        block.runs.clear()
    expected = chain_by_hand([block.block for block in blocks], [[], [0], [1], [2], [1]], X)
    for _ in range(10):
        assert torch.equal(stack(X), expected)
    assert [len(block.runs) for block in blocks] == [10, 10, 1, 1, 10]
    assert blocks[2].runs == [False], "once, for its shape, and without a trace: in eval mode"
    assert all(part.training for part in stack.modules())


def test_an_unread_module_that_changes_the_resolution_still_gives_its_shape():
    blocks = conv_blocks()
    wiring = [[], [0], [1], [0, 1], [1, 3], [4]]  # module 2, which halves the resolution, is read by nothing
    stack = mc.MaskedStack(blocks, connectivity=wiring)
    for size in (8, 16, 8):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(stack(x), chain_by_hand(blocks, wiring, x))


def test_the_shapes_of_many_input_sizes_do_not_pile_up():
    stack = mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [1], [1]])
    for size in range(1, 200):
        stack(torch.randn(size, 6))
    assert len(stack._shapes) <= 64


def test_a_module_that_changes_its_input_in_place_does_not_change_what_others_read():
    blocks = [nn.Linear(6, 6), *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(4))]
    wiring = [[], [0], [0], [0], [1, 2, 3]]
    stack = mc.MaskedStack(blocks, connectivity=wiring)
    pure = [nn.Linear(6, 6), *(nn.Sequential(nn.ReLU(), nn.Linear(6, 6)) for _ in range(4))]
    nn.ModuleList(pure).load_state_dict(stack.blocks.state_dict())
    torch.testing.assert_close(stack(X), chain_by_hand(pure, wiring, X))
    learned = mc.MaskedStack(blocks, fan_in=1)
    learned(X).sum().backward()  # autograd would say so if a saved output had been changed


class Doubled(nn.Module):
    """Changes its input in place."""

    def forward(self, x):
        for y in x if isinstance(x, tuple) else (x,):
            y.mul_(2)
        return x


@pytest.mark.parametrize(
    "layers", [[[Doubled(), Doubled()], [nn.Identity()] * 2], [[nn.Identity()] * 2, [Doubled(), Doubled()]]]
)
@pytest.mark.parametrize("connectivity", ["full", "prev"])
def test_branches_that_change_their_input_in_place_do_not_change_their_neighbors(layers, connectivity):
    stack = mc.MaskedStack(layers, connectivity=connectivity)
    assert stack(torch.ones(1, 1)).item() == 2


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_an_aggregation_that_returns_a_source_itself_does_not_share_it(learning, pairs):
    def lone(sources, mask):
        return sources[mask.tolist().index(1)]

    blocks = [nn.Identity(), Doubled(), Doubled(), Doubled()]
    given = {"fan_in": 1, "wiring": [[], [0], [0], [0]]} if learning else {"connectivity": [[], [0], [0], [0]]}
    x = (torch.ones(1), torch.ones(1)) if pairs else torch.ones(1)
    output = mc.MaskedStack(blocks, aggregation=lone, **given)(x)
    assert (output[0] if pairs else output).item() == 2


def test_output_shapes_that_depend_on_an_argument_are_not_mixed_up():
    class Every(nn.Module):
        def forward(self, x, step):
            return x[:, :, :: step if self.training else 1, ::step]

    class Same(nn.Module):
        def forward(self, x, step):
            return x

    stack = mc.MaskedStack([Every(), Same(), Same(), Same()], connectivity=[[], [0], [0], [2]])
    x = torch.ones(1, 1, 8, 8)
    for step in (2, 1, 2, 4):
        assert stack(x, step).shape == stack(x, step=step).shape == (1, 1, 8 // step, 8 // step)


def test_looking_up_a_shape_leaves_the_global_generator_alone():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)  # also in eval mode

    stack = mc.MaskedStack([nn.Identity(), Noisy(), nn.Identity(), nn.Identity()], connectivity=[[], [0], [0], [0]])
    before = torch.get_rng_state()
    stack(X)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_input_that_is_not_a_tensor_spares_the_unread_modules_too():
    class First(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1] if isinstance(pair, tuple) else pair

    blocks = [Counting(First()) for _ in range(4)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0], [0]])
    for _ in range(5):
        stack((X, X))
    assert [len(block.runs) for block in blocks] == [5, 1, 1, 5]


def test_the_same_module_may_stand_in_several_places():
    (block,) = mlp_blocks(1)
    chain = mc.MaskedStack([block, block, block], connectivity="prev")
    assert torch.equal(chain(X), block(block(block(X))))
    layered = mc.MaskedStack([[block, block], [block, block]], connectivity="full")
    torch.testing.assert_close(layered(X), block(block(X)))


@pytest.mark.parametrize("modules", [nn.ModuleList, nn.Sequential, tuple, iter])
def test_modules_come_in_any_iterable(modules):
    blocks = mlp_blocks(3)
    given = nn.Sequential(*blocks) if modules is nn.Sequential else modules(blocks)
    assert mc.wiring_of(mc.MaskedStack(given, 1)) == [[], [0], [1]]


def test_layers_come_as_module_lists_too():
    layers = nn.ModuleList([nn.ModuleList(mlp_blocks(2)), nn.ModuleList(mlp_blocks(2))])
    assert mc.wiring_of(mc.MaskedStack(layers, 1)) == [[[], []], [[0], [1]]]


def test_layers_of_different_sizes():
    stack = mc.MaskedStack([mlp_blocks(1), mlp_blocks(5), mlp_blocks(2)], fan_in=3)
    stack(X).sum().backward()
    assert stack.masks.binary.sum(dim=1).tolist() == [1] * 5 + [3] * 2


class Shifted(nn.Module):
    """Changes its input in place, and differently each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x.add_(1))


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("wiring", [[[], [0], [0], [0, 1, 2]], [[], [0], [1], [0, 1]], [[], [0], [1], [0, 1, 2]]])
def test_what_a_module_does_to_its_input_reaches_no_other_reader(wiring, learning):
    blocks = [nn.Linear(6, 6), Shifted(), Shifted(), nn.Linear(6, 6)]
    outputs = [blocks[0](X)]
    for block, row in zip(blocks[1:], wiring[1:], strict=True):
        outputs.append(block(sum(outputs[k] for k in row) / len(row) + 0))
    given = {"wiring": wiring, "fan_in": max(map(len, wiring))} if learning else {"connectivity": wiring}
    torch.testing.assert_close(mc.MaskedStack(blocks, **given)(X), outputs[-1])


def test_a_lone_source_that_nothing_else_reads_is_passed_on_without_a_copy():
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append((x, x * 2))
            return seen[-1][1]

    mc.MaskedStack([Watched(), Watched()], connectivity="prev")(X)
    assert seen[1][0] is seen[0][1]


@pytest.mark.parametrize("pairs", [True, False])
def test_an_aggregation_of_the_users_own_gets_inactive_sources_without_their_graph(pairs):
    inactive = []

    class Block(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (y, 2 * y) if pairs else y

    def add(sources, mask):
        for m, y in zip(mask, sources, strict=True):
            inactive.extend(leaf.requires_grad for leaf in (y if pairs else [y]) if m == 0)
        return sum(m * (sum(y) if pairs else y) for m, y in zip(mask, sources, strict=True))

    stack = mc.MaskedStack([Block(6, 6) for _ in range(5)], 1, aggregation=add)
    stack(X)
    assert inactive
    assert not any(inactive)


def test_a_part_in_eval_mode_stays_there_when_its_shape_is_looked_up():
    stack = mc.MaskedStack(mlp_blocks(4), connectivity=[[], [0], [1], [1]])
    stack.blocks[2][1].eval()
    stack(X)
    assert not stack.blocks[2][1].training
    assert stack.blocks[2][0].training


def test_the_branches_of_the_last_layer_are_aligned_to_the_last_of_them():
    stack = mc.MaskedStack([[nn.Linear(6, 6)], [nn.Linear(6, 4), nn.Linear(6, 8)]], connectivity="full")
    assert stack(X).shape == (3, 8)


def test_arguments_that_cannot_be_looked_up_by_are_passed_on_all_the_same():
    class Same(nn.Module):
        def forward(self, x, extra):
            return x * len(extra)

    stack = mc.MaskedStack([Same(), Same(), Same()], connectivity=[[], [0], [0]])
    assert torch.equal(stack(X, {1, 2}), 4 * X)


def test_idle_parameters_are_reached_through_the_first_leaf_that_can_carry_a_gradient():
    class Counted(nn.Linear):
        def forward(self, pair):
            return pair[0] + 1, super().forward(pair[1])

    def add(sources, mask):
        return sources[0][0], sum(m * y for m, (_, y) in zip(mask, sources, strict=True))

    stack = mc.MaskedStack([Counted(6, 6) for _ in range(4)], connectivity=[[], [0], [1], [1]], aggregation=add)
    stack((torch.zeros((), dtype=torch.long), X))[1].sum().backward()
    assert stack.blocks[2].weight.grad is not None


def test_candidates_may_be_listed_in_any_order():
    given, ordered = (mc.MaskedStack(mlp_blocks(3), 1, wiring=[[], [0], row]) for row in ([1, 0], [0, 1]))
    assert torch.equal(given.masks.source, ordered.masks.source)


def test_print_names_an_aggregation_of_the_users_own():
    def weighted(sources, mask):
        return sources[0]

    assert "aggregation=weighted" in repr(mc.MaskedStack(mlp_blocks(3), 1, aggregation=weighted))


def pooled(y, shape):
    return nn.functional.max_pool2d(y, y.shape[2] // shape[2])


@pytest.mark.parametrize("align", [None, pooled])
def test_a_checkpoint_around_a_frozen_stack_with_a_module_that_nothing_reads(align):
    convs = [nn.Conv2d(4, 4, 3, stride, padding=1) for stride in (1, 2, 1, 1, 1)]
    wiring = [[], [0], [1], [0], [2]]  # nothing reads module 3, which reads module 0 in another shape
    x = torch.randn(2, 4, 8, 8)
    stacks = [mc.MaskedStack(convs, connectivity=wiring, align=align) for _ in range(2)]
    gradients = []
    for forward in (stacks[0], lambda x: checkpoint(stacks[1], x, use_reentrant=False)):
        given = x.clone().requires_grad_()
        forward(given).square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Scaled(nn.Conv2d):
    """Halves or doubles the resolution."""

    def forward(self, x, up=1, down=1):
        return nn.functional.interpolate(super().forward(x), scale_factor=up / down)


def test_shapes_are_remembered_by_the_names_of_arguments_too():
    blocks = [Scaled(4, 4, 1), Scaled(4, 4, 1), Scaled(4, 4, 1)]
    stack = mc.MaskedStack(blocks, connectivity=[[], [0], [0]]).eval()  # nothing reads module 1
    fresh = mc.MaskedStack(blocks, connectivity=[[], [0], [0]]).eval()
    x = torch.randn(1, 4, 8, 8)
    stack.align = fresh.align = lambda y, shape: nn.functional.interpolate(y, shape[2:])
    stack(x, down=2)
    torch.testing.assert_close(stack(x, up=2), fresh(x, up=2))
