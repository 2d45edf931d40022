"""What `benchmarks/discovery.py` compares learned wiring with, and its table."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import maskconnect as mc

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def alternatives():
    spec = importlib.util.spec_from_file_location("discovery_alternatives", BENCHMARKS / "discovery_alternatives.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_relaxed_draw_adds_up_to_k_and_becomes_the_top_k(alternatives):
    scores = torch.tensor([[0.1, 2.0, 0.3, 1.5], [1.0, 0.9, 0.8, 0.7]])
    warm = alternatives.relaxed_top(scores, 2, 1.0)
    torch.testing.assert_close(warm.sum(dim=1), torch.full((2,), 2.0))
    cold = alternatives.relaxed_top(scores, 2, 0.01)
    torch.testing.assert_close(cold, torch.tensor([[0.0, 1, 0, 1], [1, 1, 0, 0]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("how", ["softmax", "gumbel"])
def test_relaxed_choices_learn_and_are_cut_to_k_sources(how, alternatives):
    torch.manual_seed(0)
    stack = mc.mixed(2, 4, 10, connectivity="full").stack
    relaxed = alternatives.Relaxed(stack, 2, how, steps=10)
    x = torch.randn(2, 4, 6, 6)
    relaxed(x).sum().backward()
    assert relaxed.alpha.grad.abs().sum() > 0
    value_TS = torch.rand(10, 9, generator=torch.Generator().manual_seed(0))
    cut = relaxed.cut(value_TS)
    assert cut.flat()[0] is stack.flat()[0]  # the same modules
    assert cut.wiring()[-1] == [sorted(value_TS[-1].topk(2).indices.tolist())]


def test_with_equal_weights_a_relaxed_stack_reads_everything(alternatives):
    torch.manual_seed(0)
    model = mc.mixed(2, 4, 10, connectivity="full").eval()
    x = torch.randn(2, 4, 6, 6)
    relaxed = alternatives.Relaxed(model.stack, 2, "softmax", steps=10).eval()
    torch.testing.assert_close(relaxed(x), model.stack(x))


def test_leaving_out_finds_the_source_that_matters(alternatives):
    class Constant(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return torch.full_like(x, self.value)

    stack = mc.MaskedStack([[Constant(0.0), nn.Identity(), Constant(0.0)], [nn.Identity()]], connectivity="full")
    relaxed = alternatives.Relaxed(stack, 1, "softmax", steps=1)
    labels = torch.tensor([0, 1, 2])
    batches = [(torch.eye(3) * 5, labels)]
    grown_TS = alternatives.left_out(relaxed, relaxed, torch.full((1, 3), 1 / 3), batches)
    assert grown_TS.argmax() == 1
    assert grown_TS[0, 1] > 0 > grown_TS[0, 0]


def test_the_table_compares_learned_wiring_with_every_row(tmp_path, capsys):
    def runs(*values):
        more = {"seconds": 10.0, "parameters": 1234, "wiring": []}
        return {str(s): {"validation": v, "test": v, **more} for s, v in enumerate(values)}

    found = {"Learned": runs(50, 52, 51), "Fixed-Random": runs(48, 47, 49)}
    (tmp_path / "discover-x.json").write_text(json.dumps(found))
    main = runpy.run_path(str(BENCHMARKS / "discovery.py"))["main"]
    main(["discover/x", "--results", str(tmp_path), "--show"])
    said = capsys.readouterr().out
    assert "| Fixed-Random | 3 | 48.00 ± 1.00 | 48.00 ± 1.00 | +3.00 (-1.30 to +7.30) | 1,234 | 10 |" in said
    assert "discovery_runs" not in sys.modules  # which needs the other files beside it
