"""Rewired models without the blocks that nothing reads."""

import copy
import json
import pickle

import pytest
import torch
from networks import EncoderBlock
from plain import PlainBlock
from torch import nn

import maskconnect as mc
from maskconnect.core.count import pruned_parameters
from maskconnect.ship.description import write_description


class Model(nn.Module):
    """Embeds tokens, runs blocks one by one, by number, and gives scores."""

    def __init__(self, depth=6):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 7)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(depth))

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for number in range(len(self.blocks)):
            x = self.blocks[number](x, key_padding_mask=mask)
        return self.head(x)


CHAIN = [[], [0], [0], [1], [2], [4]]  # 0 -> 2 -> 4 -> 5
JOINS = [[], [0], [0], [1], [0, 2], [2, 4]]
IDS = torch.randint(0, 11, (2, 5))


def weights(model):
    return sum(p.numel() for p in model.parameters())


def frozen(wiring, **options):
    return mc.rewire(Model(), "blocks", connectivity=wiring, **options)


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
@pytest.mark.parametrize("aggregation", ["mean", "sum", "scaled", "residual", lambda sources, mask: sum(sources)])
def test_unread_blocks_go_and_outputs_are_equal(wiring, aggregation):
    model = frozen(wiring, aggregation=aggregation)
    wanted = model.eval()(IDS)
    slim = mc.prune(model, IDS)
    assert torch.equal(slim(IDS), wanted)
    longer = torch.randint(0, 11, (3, 9))
    assert torch.equal(slim(longer), model(longer))
    gone = sum(p.numel() for k in (1, 3) for p in model.blocks.flat()[k].parameters())
    scales = 0 if model.blocks.scales is None else model.blocks.scales.numel()
    assert weights(slim) == weights(Model()) - gone + scales
    assert not any(isinstance(part, mc.MaskedStack) for part in slim.modules())
    names = [name for name in model.state_dict() if not name.startswith(("blocks.masks", "blocks.1.", "blocks.3."))]
    assert list(slim.state_dict()) == names
    assert weights(model) > weights(slim)  # the model itself has not changed


def test_a_chain_is_a_plain_list_again():
    slim = mc.prune(frozen(CHAIN), IDS)
    assert type(slim.blocks) is nn.ModuleList
    assert len(slim.blocks) == 6
    assert [type(block).__name__ for block in slim.blocks] == [
        "EncoderBlock", "PassThrough", "EncoderBlock", "PassThrough", "EncoderBlock", "EncoderBlock",
    ]  # fmt: skip


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
def test_a_pruned_model_trains_and_is_copied_and_pickled(wiring):
    slim = mc.prune(frozen(wiring), IDS)
    for other in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert torch.equal(other.eval()(IDS), slim.eval()(IDS))
        other.train()(IDS).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
        assert all(p.grad is None for p in slim.parameters())


def test_inputs_by_name_or_in_a_dict():
    model, mask = frozen(JOINS).eval(), torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 3:] = True
    wanted = model(IDS, mask)
    for slim in (mc.prune(model, ids=IDS, mask=mask), mc.prune(model, example={"ids": IDS, "mask": mask})):
        assert torch.equal(slim(IDS, mask), wanted)


def test_several_lists():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Sequential(*(PlainBlock(3, 3, 1, deep=False, project=False) for _ in range(3)))
            self.layer2 = nn.Sequential(
                PlainBlock(3, 6, 2, deep=False, project=True), PlainBlock(6, 6, 1, deep=False, project=False)
            )

        def forward(self, x):
            return self.layer2(self.layer1(x))

    x = torch.randn(2, 3, 8, 8)
    for wiring, plain in (([[], [0], [0], [2], [3]], True), ([[], [0], [0], [0, 2], [2, 3]], False)):
        model = mc.rewire(Net(), ["layer1", "layer2"], connectivity=wiring).eval()
        slim = mc.prune(model, x)
        assert torch.equal(slim(x), model(x))
        assert (type(slim.layer1), type(slim.layer2)) == (nn.Sequential, nn.Sequential) or not plain
        assert not any(name.startswith("layer1.1.") for name in slim.state_dict())
        assert weights(slim) == pruned_parameters(model).transitive
    skipping = mc.rewire(Net(), ["layer1", "layer2"], connectivity=[[], [0], [0], [2], [1]]).eval()
    slim = mc.prune(skipping, x)  # block 3, which halves the picture, is gone
    assert torch.equal(slim(x), skipping(x))
    assert not any(name.startswith("layer2.0.") for name in slim.state_dict())
    other = torch.randn(1, 3, 13, 13)
    assert torch.equal(slim(other), skipping(other))


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
def test_what_the_model_computes_after_a_block_that_goes_is_not_put_into_the_chain(wiring, tmp_path):
    class Between(Model):
        def __init__(self):
            super().__init__()
            self.between = nn.Linear(16, 16)

        def forward(self, ids):
            x = self.embed(ids)
            for number, block in enumerate(self.blocks):
                x = self.between(block(x)) if number in (0, 3) else block(x)
            return self.head(x)

    model = mc.rewire(Between(), "blocks", connectivity=wiring).eval()
    slim = mc.prune(model, IDS)
    assert torch.equal(slim(IDS), model(IDS))
    mc.save(slim, tmp_path)
    assert torch.equal(mc.load(tmp_path, into=mc.rewire(Between(), "blocks", connectivity=wiring))(IDS), model(IDS))


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
def test_the_model_may_ask_a_block_that_is_gone_for_its_attributes(wiring):
    class Asking(Model):
        def __init__(self):
            super().__init__()
            for number, block in enumerate(self.blocks):
                block.kind, block.number = "even" if number % 2 == 0 else "odd", number

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x) if block.kind == "even" or block.number < 99 else None
            return self.head(x)

    model = mc.rewire(Asking(), "blocks", connectivity=wiring).eval()
    assert torch.equal(mc.prune(model, IDS)(IDS), model(IDS))


def test_a_block_whose_output_a_hook_hands_to_the_model_stays():
    asked = []  # the list that hooks append to, if there is one, as in transformers

    class Collecting(Model):
        def forward(self, ids, collect=False):
            asked.extend([[]] * collect)
            y = super().forward(ids)
            return y, asked.pop() if collect else None

    model = Collecting()
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, y: asked[-1].append(y) if asked else None)
    mc.rewire(model, "blocks", connectivity=CHAIN).eval()
    model(IDS)
    assert [len(model(IDS, collect=True)[1]) for _ in range(3)] == [6, 6, 6]
    assert weights(mc.prune(model, IDS)) < weights(Model())
    slim = mc.prune(model, IDS, collect=True)
    assert weights(slim) == weights(Model())
    assert all(torch.equal(*pair) for pair in zip(slim(IDS, True)[1], model(IDS, True)[1], strict=True))


def test_a_model_that_is_itself_a_list():
    model = mc.rewire(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), "", connectivity=[[], [0], [0], [2]])
    slim = mc.prune(model, torch.randn(2, 4))
    assert type(slim) is nn.Sequential
    assert list(slim.state_dict()) == [f"{k}.{name}" for k in (0, 2, 3) for name in ("weight", "bias")]


def test_a_block_whose_output_the_model_uses_stays_with_what_it_reads():
    class Collects(Model):
        def forward(self, ids):
            x, collected = self.embed(ids), []
            for block in self.blocks:
                x = block(x)
                collected.append(x)
            return self.head(x), collected[3]

    model = mc.rewire(Collects(), "blocks", connectivity=CHAIN).eval()
    slim = mc.prune(model, IDS)
    for found, wanted in zip(slim(IDS), model(IDS), strict=True):
        assert torch.equal(found, wanted)
    assert any(name.startswith("blocks.3.") for name in slim.state_dict())
    assert any(name.startswith("blocks.1.") for name in slim.state_dict())  # block 3 reads it


def test_a_rewired_list_inside_a_module_of_a_stack_and_a_stack_inside_a_block():
    inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    stack = mc.MaskedStack(
        [nn.Linear(4, 4), nn.Sequential(inner, nn.Tanh()), nn.Tanh()], connectivity=[[], [0], [0, 1]]
    )
    model = mc.rewire(nn.Sequential(stack, nn.Linear(4, 2)), "0.blocks.1.0", connectivity=[[], [0], [0]]).eval()
    x = torch.randn(2, 4)
    slim = mc.prune(model, x, merge=False)
    torch.testing.assert_close(slim(x), model(x))
    assert weights(slim) < weights(model)
    outer = nn.Sequential(
        *(mc.MaskedStack([nn.Linear(4, 4) for _ in range(3)], connectivity=[[], [0], [0]]) for _ in "ab")
    )
    model = mc.rewire(nn.Sequential(outer), "0", connectivity="prev").eval()
    slim = mc.prune(model, x)
    torch.testing.assert_close(slim(x), model(x))
    assert weights(slim) == 4 * (4 * 4 + 4)


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
def test_saved_and_loaded(tmp_path, wiring):
    model = mc.rewire(Model(), "blocks", fan_in=[1, 1, 1, *map(len, wiring[4:])])
    model.blocks.masks.fix(model.blocks.layout.from_plain(wiring, what="wiring"))
    model.eval()
    mc.save(model, tmp_path / "frozen")
    fresh = mc.rewire(Model(), "blocks", fan_in=[1, 1, 1, *map(len, wiring[4:])])
    again = mc.load(tmp_path / "frozen", into=copy.deepcopy(fresh))
    assert torch.equal(again(IDS), model(IDS))
    slim = mc.prune(model, IDS)
    mc.save(slim, tmp_path / "slim")
    again = mc.load(tmp_path / "slim", into=fresh)
    assert torch.equal(again(IDS), slim(IDS))
    assert list(again.state_dict()) == list(slim.state_dict())
    assert torch.equal(mc.load(tmp_path / "slim", into=mc.prune(model, IDS))(IDS), slim(IDS))
    assert (tmp_path / "slim" / "model.safetensors").stat().st_size < (
        tmp_path / "frozen" / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize(
    "form", [3, {"kind": "code"}, {"kind": "zeros"}, {"kind": "zeros", "scale": [[1, 0]]}, {"kind": "tuple"}]
)
def test_a_damaged_description_is_one_sentence(tmp_path, form):
    model = frozen(CHAIN)
    mc.save(mc.prune(model, IDS), tmp_path)
    place = tmp_path / "maskconnect.json"
    described = json.loads(place.read_text())
    described["stacks"]["blocks"]["forms"]["1"] = form
    kept = {
        name: value for name, value in described.items() if name not in ("format", "maskconnect", "checksum", "files")
    }
    write_description(tmp_path, kept, list(described["files"]))
    with pytest.raises(mc.CheckpointError, match="does not describe a network that can be built"):
        mc.load(tmp_path, into=frozen(CHAIN))


@pytest.mark.parametrize("wiring", [CHAIN, JOINS])
def test_a_program_of_torch_export_takes_any_length(wiring):
    slim = mc.prune(frozen(wiring), IDS).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(slim, (IDS,), dynamic_shapes=({0: batch, 1: length},), strict=False)
    longer = torch.randint(0, 11, (4, 9))
    torch.testing.assert_close(program.module()(longer), slim(longer))
    assert not any("blocks.1" in name or "masks" in name for name in program.state_dict)


def test_a_model_that_is_not_rewired_is_refused_by_load(tmp_path):
    mc.save(mc.prune(frozen(CHAIN), IDS), tmp_path)
    with pytest.raises(mc.ConfigError, match=r"the model is not rewired; pass into=mc.rewire\(model, 'blocks'"):
        mc.load(tmp_path, into=Model())


def test_a_model_that_still_learns_is_refused():
    with pytest.raises(mc.ConnectivityError, match="still being learned"):
        mc.prune(mc.rewire(Model(), "blocks", fan_in=1), IDS)
