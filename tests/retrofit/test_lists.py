"""Chains over several lists, containers with a forward of their own, and residual joins of blocks of any model."""

import copy
import pickle

import pytest
import torch
from networks import EncoderBlock
from plain import PlainBlock
from torch import nn

import maskconnect as mc


class Net(nn.Module):
    """A ResNet in three stages."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(*(PlainBlock(4, 4, 1, deep=False, project=False) for _ in range(2)))
        self.layer2 = nn.Sequential(
            PlainBlock(4, 8, 2, deep=False, project=True), PlainBlock(8, 8, 1, deep=False, project=False)
        )
        self.layer3 = nn.Sequential(PlainBlock(8, 16, 2, deep=False, project=True))
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))


LISTS = ["layer1", "layer2", "layer3"]
WIRING = [[], [0], [0, 1], [0, 1, 2], [1, 3]]


def test_one_chain_of_several_lists_equals_the_model_with_fixed_prev():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    names = list(model.state_dict())
    rewired = mc.rewire(copy.deepcopy(model), LISTS, connectivity="prev")
    assert torch.equal(rewired(x), model(x))
    assert [name for name in rewired.state_dict() if "masks" not in name] == names
    assert len(mc.wiring_of(rewired)) == 5


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_one_chain_of_several_lists_computes_what_a_stack_does(aggregation):
    model, x = Net().double(), torch.randn(2, 3, 8, 8).double()
    blocks = [*model.layer1, *model.layer2, *model.layer3]
    stack = mc.MaskedStack(blocks, connectivity=WIRING, aggregation=aggregation).double()
    wanted = model.fc(stack(model.stem(x)).mean((2, 3)))
    found = mc.rewire(model, LISTS, connectivity=WIRING, aggregation=aggregation)(x)
    torch.testing.assert_close(found, wanted)


def test_one_chain_of_several_lists_learns_as_a_stack_does():
    model, x = Net().double(), torch.randn(2, 3, 8, 8).double()
    stack = mc.MaskedStack([*model.layer1, *model.layer2, *model.layer3], 2, mask_init=0.5, seed=3).double()
    for _ in range(3):
        model.fc(stack(model.stem(x)).mean((2, 3))).square().sum().backward()
    wanted = stack.masks.real.grad
    mc.rewire(model, LISTS, 2, mask_init=0.5, seed=3)
    for _ in range(3):
        model(x).square().sum().backward()
    torch.testing.assert_close(model.layer1.masks.real.grad, wanted)
    assert len(mc.param_groups(model, 0.1, 0.1)[1]["params"]) == 1


def test_copies_and_pickles_of_several_lists_are_whole():
    model, x = mc.rewire(Net(), LISTS, connectivity=WIRING).eval(), torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        for parameter in other.parameters():
            parameter.data.zero_()
        assert model(x).abs().sum() > 0
        assert all(tap._place[0] is other.layer1 for part in LISTS for tap in getattr(other, part))


def test_a_plain_checkpoint_loads_into_several_lists():
    plain, model = Net(), mc.rewire(Net(), LISTS, fan_in=2)
    model.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_masks_move_with_the_model():
    model = mc.rewire(Net(), LISTS, fan_in=2).double()
    assert model.layer1.masks.real.dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in model.parameters())


class Stage(nn.Module):
    """A stage with a forward of its own, which runs its children in order."""

    def __init__(self, way, depth=4):
        super().__init__()
        self.way, self.scale = way, nn.Parameter(torch.tensor(2.0))
        for i in range(depth):
            self.add_module(f"b{i}", EncoderBlock())

    def forward(self, x):
        if self.way == "children":
            for block in self.children():
                x = block(x)
        else:
            for i in range(4):
                x = getattr(self, f"b{i}")(x)
        return self.scale * x


class Doubled(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    "make",
    [lambda: Stage("children"), lambda: Stage("names"), lambda: Doubled(*(EncoderBlock() for _ in range(4)))],
)
def test_a_container_keeps_the_forward_of_its_own(make):
    model, x = nn.Sequential(make()), torch.randn(2, 3, 16)
    wanted, names = model(x), list(model.state_dict())
    same = mc.rewire(copy.deepcopy(model), "0", connectivity="prev")
    assert torch.equal(same(x), wanted)
    rewired = mc.rewire(copy.deepcopy(model), "0", connectivity=[[], [0], [0], [2]])
    blocks = [block for block in model[0].children() if isinstance(block, EncoderBlock)]
    inside = blocks[3](blocks[2](blocks[0](x)))
    torch.testing.assert_close(rewired(x), x + inside if isinstance(model[0], Doubled) else 2 * inside)
    assert isinstance(rewired[0], type(model[0]))
    assert [name for name in rewired.state_dict() if "masks" not in name] == names
    other = pickle.loads(pickle.dumps(rewired))
    assert torch.equal(other(x), rewired(x))
    assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in rewired.parameters()})


def test_a_rewired_list_is_still_of_its_class_and_does_not_change_in_length():
    model = nn.Sequential(nn.ModuleList(EncoderBlock() for _ in range(3)))
    mc.rewire(model, "0", fan_in=1)
    assert isinstance(model[0], nn.ModuleList)
    for change in (lambda: model[0].append(EncoderBlock()), lambda: model[0].insert(0, EncoderBlock())):
        with pytest.raises(mc.ConnectivityError, match="has masks for the blocks that it had"):
            change()


def test_a_block_that_is_replaced_is_the_one_that_runs():
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    mc.rewire(model, "0", connectivity=[[], [0], [0, 1]])
    new = nn.Linear(4, 4)
    model.set_submodule("0.2", new)
    x = torch.randn(2, 4)
    first = model[0].flat()
    y0 = first[0](x)
    torch.testing.assert_close(model(x), new((y0 + first[1](y0)) / 2))


class Pre(nn.Module):
    """Blocks that add to a stream, run one by one."""

    def __init__(self, depth=5):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_residual_joins_add_what_blocks_add_and_average_what_they_read():
    model, x = Pre().double(), torch.randn(2, 3, 16).double()
    wiring = [[], [0], [0, 1], [0, 1, 2], [3]]
    reads, outs = [], []
    for block, row in zip(model.blocks, wiring, strict=True):
        if not row:
            read = x
        elif len(row) == 1:
            read = outs[row[0]]
        else:
            added = sum(outs[k] - reads[k] for k in row)
            read = added + sum(reads[k] for k in row) / len(row)
        reads.append(read)
        outs.append(block(read))
    rewired = mc.rewire(model, "blocks", connectivity=wiring, aggregation="residual")
    torch.testing.assert_close(rewired(x), outs[-1])


@pytest.mark.parametrize("training", [True, False])
def test_residual_joins_of_the_block_before_change_nothing_bitwise(training):
    model, x = Pre().train(training), torch.randn(2, 3, 16)
    wanted = model(x)
    fixed = mc.rewire(copy.deepcopy(model), "blocks", connectivity="prev", aggregation="residual")
    drawn = mc.rewire(copy.deepcopy(model), "blocks", fan_in=1, mask_init=1e-9, aggregation="residual")
    assert torch.equal(fixed(x), wanted)
    assert torch.equal(drawn(x), wanted)


def test_where_a_block_changes_the_shape_a_residual_join_averages_its_whole_output():
    model, x = Net().double(), torch.randn(2, 3, 8, 8).double()
    blocks = [*model.layer1, *model.layer2, *model.layer3]
    rewired = mc.rewire(copy.deepcopy(model), LISTS, connectivity=[[], [0], [1], [2], [2, 3]], aggregation="residual")
    y = model.stem(x)
    for block in blocks[:3]:
        y = block(y)
    z = blocks[3](y)
    wanted = model.fc(blocks[4](y / 2 + z - y / 2).mean((2, 3)))
    torch.testing.assert_close(rewired(x), wanted)


class Adds(nn.Module):
    """A block that adds to its input, perhaps in place."""

    def __init__(self, width, in_place):
        super().__init__()
        self.linear, self.in_place = nn.Linear(width, width), in_place

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.in_place:
            x += y
            return x
        return x + y


def adding(in_place, **options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Adds(4, in_place) for _ in range(4))))
    return mc.rewire(model, "1", **options)


OVERWRITING = [{"connectivity": [[], [0], [0, 1], [1, 2]]}, {"fan_in": 2, "mask_init": "uniform"}]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OVERWRITING)
def test_residual_joins_refuse_a_block_that_writes_over_its_input(options, training):
    model = adding(in_place=True, aggregation="residual", **options).train(training)
    with pytest.raises(mc.ConnectivityError, match="the input of block 0 was changed in place, which its shortcut"):
        model(torch.randn(3, 4))


def test_residual_joins_refuse_a_model_that_writes_over_the_input_of_a_block():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = 1 * x
            for block in self.blocks:
                x += block(x)
            return x

    model = mc.rewire(Outside(), "blocks", connectivity=[[], [0], [0, 1]], aggregation="residual")
    with pytest.raises(mc.ConnectivityError, match="the input of block 0 was changed in place"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize("options", OVERWRITING)
def test_residual_joins_refuse_it_in_inference_mode_where_torch_counts_no_changes(options):
    model, x = adding(in_place=True, aggregation="residual", **options).eval(), torch.randn(3, 4)
    with torch.inference_mode(), pytest.raises(mc.ConnectivityError, match="block 0 returned its input itself"):
        model(x)
    same = adding(in_place=False, aggregation="residual", **options).eval()
    wanted = same(x)
    with torch.inference_mode():
        assert torch.equal(same(x), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"connectivity": [[], [0], [1], [1]], "aggregation": "residual"},
        {"connectivity": [[], [0], [0, 1], [1, 2]], "aggregation": "mean"},
        {"fan_in": 2, "aggregation": "sum"},
    ],
)
def test_a_block_may_write_over_its_input_where_no_join_needs_that_input(options):
    models = [adding(in_place, **options) for in_place in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(3, 4)
    found, wanted = (model(x) for model in models)
    torch.testing.assert_close(found, wanted)


class Halve(nn.Module):
    """Channels last: half as many positions, twice as many channels."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x):
        return self.linear(x[:, ::2, ::2])


def test_nhwc_outputs_are_aligned_along_their_own_axes():
    blocks = [nn.Linear(4, 4), Halve(4), nn.Linear(8, 8)]
    model, x = nn.Sequential(*blocks), torch.randn(2, 6, 6, 4)
    wiring = [[], [0], [0, 1]]
    with pytest.raises(mc.ConnectivityError, match="cannot feed module 2"):
        mc.rewire(copy.deepcopy(model), "", connectivity=wiring)(x)
    y0 = blocks[0](x)
    padded = torch.cat([y0[:, ::2, ::2], torch.zeros(2, 3, 3, 4)], dim=-1)
    wanted = blocks[2]((padded + blocks[1](y0)) / 2)
    torch.testing.assert_close(mc.rewire(copy.deepcopy(model), "", connectivity=wiring, align="nhwc")(x), wanted)
    stack = mc.MaskedStack(blocks, connectivity=wiring, align="nhwc")
    torch.testing.assert_close(stack(x), wanted)


def test_candidates_can_be_limited_and_every_block_be_read():
    model = mc.rewire(Pre(), "blocks", fan_in=1, wiring=[[], [0], [0, 1], [1, 2], [2, 3]], use_all=True)
    assert model.blocks.masks.candidates[4] == (2, 3)
    for _ in range(20):
        model(torch.randn(2, 3, 16))
        drawn = model.blocks.masks.binary.int().argmax(dim=1).tolist()
        rows = zip(model.blocks.masks.candidates[1:], drawn, strict=True)
        assert sorted(candidates[place] for candidates, place in rows) == [0, 1, 2, 3]
