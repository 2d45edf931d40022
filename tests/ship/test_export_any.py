"""Exports of networks that read other things than images: ids and masks, several inputs, any length."""

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.errors import ConfigError, MaskConnectError
from maskconnect.ship import export
from maskconnect.ship.export import export_onnx, export_pt2
from maskconnect.ship.given_inputs import given_inputs

AXES = {0: "batch", 1: "length"}
DYNAMIC = {"ids": AXES, "mask": AXES}
WIRING = [[], [0], [0], [0, 2], [2, 3]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x, padding=None):
        return x + self.attention(self.norm(x), x, x, key_padding_mask=padding, need_weights=False)[0]


class Reader(nn.Module):
    """Reads ids and a mask of those that count; returns a dict, with things in it that are not tensors."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in WIRING)

    def forward(self, ids, mask, temperature=1.0):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, padding=mask == 0)
        total = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.head(total) / temperature, "cache": object(), "states": (x, None), "loss": None}


def ids_and_mask(batch=2, length=6):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - length // 3 :] = 0
    return {"ids": torch.randint(0, 11, (batch, length)), "mask": mask}


@pytest.fixture
def slim():
    """A rewired model without the block that nothing reads."""
    torch.manual_seed(0)
    model = mc.rewire(Reader().eval(), "blocks", connectivity=WIRING)
    pruned = mc.prune(model, ids_and_mask())
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in Reader().parameters())
    return pruned


def run_onnx(path, *args, **kwargs):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    named = kwargs or dict(zip((x.name for x in session.get_inputs()), args, strict=True))
    found = session.run(None, {name: x.numpy() for name, x in named.items()})
    return {y.name: torch.from_numpy(value) for y, value in zip(session.get_outputs(), found, strict=True)}


def run_pt2(path, *args, **kwargs):
    y = torch.export.load(path).module()(*args, **kwargs)
    values = y.items() if isinstance(y, dict) else enumerate(y if isinstance(y, tuple) else (y,))
    return {name if isinstance(name, str) else f"output_{name}": value for name, value in values}


FORMS = pytest.mark.parametrize(("write", "run"), [(export_onnx, run_onnx), (export_pt2, run_pt2)])


@FORMS
@torch.no_grad()
def test_a_pruned_rewired_model_takes_batches_and_lengths_by_name(write, run, slim, tmp_path):
    apart = write(slim, {**ids_and_mask(), "temperature": 2.0}, tmp_path / "a.file", dynamic=DYNAMIC)
    assert apart < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["a.file"]
    for batch, length in ((1, 1), (1, 9), (5, 2)):
        given = ids_and_mask(batch, length)
        found, expected = run(tmp_path / "a.file", **given), slim(**given, temperature=2.0)
        assert list(found) == ["logits", "states_0"]
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["states_0"], expected["states"][0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_frozen_rewired_model_is_pruned_first(tmp_path):
    model = mc.rewire(Reader().eval(), "blocks", connectivity=WIRING)
    assert export_pt2(model, ids_and_mask(), tmp_path / "a.pt2", dynamic=DYNAMIC) < 1e-5
    names = torch.export.load(tmp_path / "a.pt2").state_dict
    assert not any(".1.attention" in name or "masks" in name for name in names)
    assert any(".2.attention" in name for name in names)


def test_an_onnx_file_names_inputs_axes_and_outputs(slim, tmp_path):
    import onnx

    export_onnx(slim, tuple(ids_and_mask().values()), tmp_path / "a.onnx", dynamic=DYNAMIC)
    graph = onnx.load(tmp_path / "a.onnx").graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    both = ["batch", "length"]
    assert shapes == {"ids": both, "mask": both, "logits": ["batch", 3], "states_0": [*both, 8]}


class Pair(nn.Module):
    def forward(self, first, second, *, scale=3):
        return first * scale, None, [first + second]


@FORMS
def test_a_tuple_is_passed_by_place_and_its_first_axes_are_one_batch(write, run, tmp_path):
    write(Pair(), (torch.randn(1, 4), torch.randn(1, 4)), tmp_path / "a.file")
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    found = run(tmp_path / "a.file", x, y)
    torch.testing.assert_close(found, {"output_0": 3 * x, "output_1": x + y})


@FORMS
@torch.no_grad()
def test_one_tensor_of_ids_may_have_any_number_of_rows(write, run, tmp_path):
    stack = mc.MaskedStack([nn.Linear(8, 8) for _ in range(4)], connectivity=[[], [0], [0], [0, 2]])
    model = nn.Sequential(nn.Embedding(11, 8), stack).eval()
    for network in (model, mc.prune(model, torch.tensor([[1, 10, 3]]))):
        write(network, torch.tensor([[1, 10, 3]]), tmp_path / "a.file", overwrite=True)
        ids = torch.randint(0, 11, (5, 3))
        torch.testing.assert_close(run(tmp_path / "a.file", ids), {"output_0": model(ids)}, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_images_by_name_may_have_several_outputs_and_any_height(tmp_path):
    class Two(nn.Module):
        def forward(self, pixels):
            return {"mean": pixels.mean((1, 2, 3)), "same": pixels}

    dynamic = {"pixels": {0: "batch", 2: "height"}}
    export_onnx(Two(), {"pixels": torch.zeros(1, 3, 8, 8)}, tmp_path / "a.onnx", dynamic=dynamic)
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(run_onnx(tmp_path / "a.onnx", pixels=x), {"mean": x.mean((1, 2, 3)), "same": x})


def test_a_network_that_takes_one_dict_gets_one(tmp_path):
    class OfDict(nn.Module):
        def forward(self, batch):
            return batch["a"] + batch["b"]

    export_pt2(OfDict(), {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path / "a.pt2")
    found = run_pt2(tmp_path / "a.pt2", a=torch.ones(5, 3), b=torch.ones(5, 3))
    torch.testing.assert_close(found, {"output_0": 2 * torch.ones(5, 3)})


def test_other_sizes_have_the_ids_of_the_example_and_masks_keep_their_order():
    given = given_inputs(Reader(), ids_and_mask(), DYNAMIC)
    cases = list(given.others())
    assert {tuple(case.tensors["ids"].shape) for case in cases} == {(2, 6), (3, 8), (1, 3), (1, 6), (2, 1)}
    for case in cases:
        assert set(case.tensors["ids"].flatten().tolist()) <= set(given.tensors["ids"].flatten().tolist())
    assert cases[1].tensors["mask"].tolist() == [[1] * 8, [1, 1, 1, 1, 0, 0, 1, 1], [1] * 8]


def test_a_length_that_the_network_refuses_is_not_tried(tmp_path):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(6, 8))

        def forward(self, x):
            return x + self.places[: x.shape[1]]

    export_pt2(Short(), torch.zeros(2, 6, 8), tmp_path / "a.pt2", dynamic={"x": AXES})
    assert run_pt2(tmp_path / "a.pt2", torch.zeros(1, 4, 8))["output_0"].shape == (1, 4, 8)


@FORMS
def test_a_file_that_is_right_for_one_length_only_is_not_left_behind(write, run, slim, tmp_path, monkeypatch):
    def wrong(path):
        def run(ids, mask):
            y = {name: value for name, value in slim(ids, mask).items() if name == "logits" or name == "states"}
            return y["logits"] if ids.shape[1] == 6 else y["logits"] + 1, y["states"][0]

        return run

    for runner in ("_onnx_runner", "_pt2_runner"):
        monkeypatch.setattr(export, runner, wrong)
    with pytest.raises(MaskConnectError, match="differs from this one"):
        write(slim, ids_and_mask(), tmp_path / "a.file", dynamic=DYNAMIC)
    assert not list(tmp_path.iterdir())


@FORMS
def test_an_input_that_the_network_does_not_use_stays_an_input(write, run, tmp_path):
    class Deaf(nn.Module):
        def forward(self, x, unused):
            return x + 1

    write(Deaf(), {"x": torch.ones(2, 3), "unused": torch.ones(2, 3)}, tmp_path / "a.file")
    given = {"x": torch.ones(5, 3), "unused": torch.zeros(5, 3)}
    torch.testing.assert_close(run(tmp_path / "a.file", **given), {"output_0": 2 * torch.ones(5, 3)})
    if write is export_pt2:  # onnxruntime does not compare the lengths of two inputs
        with pytest.raises((AssertionError, RuntimeError), match=r"(?i)guard|expected"):
            run(tmp_path / "a.file", x=torch.ones(5, 3), unused=torch.zeros(4, 3))


class Twice(nn.Module):
    def forward(self, x):
        return {"a": (x,), "a_0": x}


class Nothing(nn.Module):
    def forward(self, x):
        return {"loss": None}


@pytest.mark.parametrize(
    ("network", "example", "dynamic", "said"),
    [
        (Pair(), {"scale": 3}, None, "the example has no tensor; pass a tensor, a tuple of them, or a dict"),
        (Pair(), (), None, "the example has no tensor"),
        (Pair(), (torch.ones(2), [torch.ones(2)]), None, "the input 'second' is a list of tensors; pass each"),
        (Reader(), ids_and_mask(), {"idz": AXES}, "a name in `dynamic` is 'idz'; it must be one of ids, mask"),
        (Reader(), ids_and_mask(), {"ids": {2: "width"}}, "names axis 2 of ids, which has axes 0 to 1"),
        (Reader(), ids_and_mask(), {"ids": {-1: "length"}}, "names axis -1 of ids"),
        (Pair(), (torch.ones(2), torch.ones(3)), None, "'batch' has 2 entries in first and 3 in second"),
        (Pair(), (torch.ones(0), torch.ones(0)), None, "axis 0 of first is empty"),
        (Pair(), (1, 2, torch.ones(3)), None, "the example has 3 arguments; the network takes 2"),
        (Reader(), (torch.ones(2, 6), torch.ones(2, 6)), None, "cannot read ids of 2x6, mask of 2x6: "),
        (Nothing(), torch.ones(2), None, "returns a dict without tensors; there is nothing to export"),
        (Twice(), torch.ones(2), None, "two outputs of the network would have the same name: a_0, a_0"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(network, example, dynamic, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        export_pt2(network, example, tmp_path / "a.pt2", dynamic=dynamic)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
