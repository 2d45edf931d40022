"""A list of blocks that a model runs one by one, with masks between them."""

import copy
import pickle

import pytest
import torch
from networks import EncoderBlock
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import maskconnect as mc


class Loops(nn.Module):
    """What models do with a list of blocks."""

    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(5))
        self.bias = nn.ParameterList(torch.randn(16) for _ in range(5))
        self.way = way
        for block, scale in zip(self.blocks, (1, 2, 3, 4, 5), strict=True):
            block.scale = scale

    def forward(self, x):
        kept = []
        if self.way == "enumerate":
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i in (1, 3):
                    kept.append(x)
        elif self.way == "index":
            for i in range(len(self.blocks)):
                x = self.blocks[i](x)
        elif self.way == "zip":
            for block, bias in zip(self.blocks, self.bias, strict=True):
                x = block(x + bias)
        elif self.way == "residual":
            for block in self.blocks:
                x = x + 0.1 * block(x)
        elif self.way == "attribute":
            for block in self.blocks:
                x = block(x) / block.scale
        elif self.way == "early exit":
            for block in self.blocks[:3]:
                x = block(x)
        elif self.way == "checkpoint":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        elif self.way == "reentrant":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
        elif self.way == "breaks":
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
        elif self.way == "reversed":
            for block in reversed(self.blocks):
                x = block(x)
        return sum(kept, x)


WAYS = ["enumerate", "index", "zip", "residual", "attribute", "early exit"]


@pytest.mark.parametrize("way", [*WAYS, "checkpoint", "reversed"])
def test_whatever_a_model_does_with_its_list_fixed_prev_changes_nothing(way):
    model, x = Loops(way), torch.randn(2, 3, 16, requires_grad=True)
    wanted = model(x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    found = mc.rewire(model, "blocks", connectivity="prev")(x)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.autograd.grad(found.square().sum(), x)[0], gradient)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_reads_what_the_model_passes_on_from_the_blocks_that_its_mask_makes_active(way):
    model, x = Loops(way).double(), torch.randn(2, 3, 16).double()
    blocks, wiring = list(model.blocks), [[], [0], [0, 1], [0, 2], [1, 2, 3]]
    handed = []

    def read(number, x):
        handed.append(x)  # what is handed to block j came out of block j-1
        return sum(handed[k + 1] for k in wiring[number]) / len(wiring[number]) if number else x

    def by_hand():
        by_hand_model = copy.copy(model)
        by_hand_model._modules = dict(model._modules)
        del by_hand_model._modules["blocks"]
        wrapped = [lambda x, n=n, b=b: b(read(n, x)) for n, b in enumerate(blocks)]
        for call, block in zip(wrapped, blocks, strict=True):
            call.scale = block.scale
        object.__setattr__(by_hand_model, "blocks", wrapped)
        return by_hand_model(x)

    wanted = by_hand()
    torch.testing.assert_close(mc.rewire(model, "blocks", connectivity=wiring)(x), wanted)


def test_a_rewired_list_learns_as_a_stack_does():
    model, x = Loops("index").double(), torch.randn(2, 3, 16).double()
    stack = mc.MaskedStack(list(model.blocks), 2, mask_init=0.5, seed=7).double()
    for _ in range(3):
        stack(x).square().sum().backward()
    wanted = [stack.masks.real.grad, *(p.grad.clone() for p in stack.blocks.parameters())]
    stack.zero_grad()
    mc.rewire(model, "blocks", 2, mask_init=0.5, seed=7)
    for _ in range(3):
        model(x).square().sum().backward()
    found = [model.blocks.masks.real.grad, *(p.grad for block in model.blocks for p in block.block.parameters())]
    torch.testing.assert_close(found, wanted)


def test_each_block_is_itself_to_those_who_ask_it():
    model = Loops("index")
    first = model.blocks[0]
    mc.rewire(model, "blocks", fan_in=2)
    assert [block.scale for block in model.blocks] == [1, 2, 3, 4, 5]
    model.blocks[1].scale = 7
    model.blocks[2].requires_grad_(False)
    model.blocks[3].eval()
    inside = model.blocks.flat()
    assert inside[1].scale == 7
    assert [all(p.requires_grad for p in block.parameters()) for block in inside] == [True, True, False, True, True]
    assert [block.training for block in inside] == [True, True, True, False, True]
    assert [block.training for block in model.blocks] == [True, True, True, False, True]
    assert model.blocks[-1].norm1 is inside[4].norm1
    assert inside[0] is first
    assert not any("_taps" in name or ".block." in name for name in model.state_dict())
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.blocks[0].nothing


def test_a_rewired_model_is_copied_and_pickled_even_in_the_middle_of_a_pass():
    model, x = mc.rewire(Loops("early exit"), "blocks", fan_in=2), torch.randn(2, 3, 16)
    model(x)  # ends before the last block
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.way = "index"
        assert all(tap._place[0] is other.blocks for tap in other.blocks)
        other(x).sum().backward()
        assert model.blocks.masks.real.grad is None
        assert torch.equal(other.eval()(x), copy.deepcopy(other)(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("aggregation", ["mean", "residual"])
@pytest.mark.parametrize(
    "options", [{"fan_in": 2, "mask_init": "uniform"}, {"connectivity": [[], [0], [0], [0, 1], [3]]}]
)
def test_checkpointing_goes_around_the_whole_list(reentrant, aggregation, options):
    models = [mc.rewire(Loops("index"), "blocks", aggregation=aggregation, **options) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    xs = [torch.randn(2, 3, 16).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    models[0](xs[0]).square().sum().backward()
    checkpoint(models[1], xs[1], use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("way", "said"),
    [("reversed", "block 4 ran out of order, alone"), ("reentrant", "needs use_reentrant=False")],
)
def test_blocks_that_run_out_of_turn_are_an_error(way, said, training):
    model = mc.rewire(Loops(way), "blocks", fan_in=2).train(training)
    with pytest.raises(mc.ConnectivityError, match=said):
        model(torch.randn(2, 3, 16, requires_grad=True)).sum().backward()
    model.way = "index"
    model(torch.randn(2, 3, 16))  # it recovers


def test_blocks_that_nothing_reads_get_a_gradient_of_zero():
    model = mc.rewire(Loops("index"), "blocks", connectivity=[[], [0], [0], [0], [0, 3]])
    model(torch.randn(2, 3, 16)).sum().backward()
    for number, block in enumerate(model.blocks.flat()):
        nothing = all((p.grad == 0).all() for p in block.parameters())
        assert nothing == (number in (1, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own making
@pytest.mark.parametrize("options", [{"connectivity": [[], [0], [0], [0, 2], [2, 3]]}, {"fan_in": 2}])
def test_a_rewired_model_compiles_whole(options):
    model, x = mc.rewire(Loops("index"), "blocks", **options), torch.randn(2, 3, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(4):  # passes without the compiler find that nobody uses block 1, which is then left out
        torch.testing.assert_close(compiled.eval()(x), model(x))
    if "connectivity" in options:
        assert model.blocks.forms[1] is not None
    compiled.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.ndim > 1)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize(
    ("way", "aggregation"),
    [("index", "mean"), ("enumerate", "residual"), ("residual", "scaled"), ("checkpoint", "mean"), ("breaks", "mean")],
)
def test_a_rewired_model_that_is_compiled_learns_as_it_does_otherwise(way, aggregation):
    whole = way not in ("checkpoint", "breaks")  # where blocks are compiled one by one, if at all
    model = mc.rewire(Loops(way), "blocks", fan_in=2, mask_init="uniform", aggregation=aggregation)
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 16)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=whole)
    for _ in range(4):
        compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
        assert torch.equal(model.blocks.masks.binary, twin.blocks.masks.binary)
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.startswith("bias."):  # of the model, which these ways do not use
            torch.testing.assert_close(found.grad, expected.grad, msg=name)
    assert counter.frame_count == 1 or not whole
