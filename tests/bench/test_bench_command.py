"""`maskconnect bench`: training steps beside those of plain networks."""

import json

import pytest
import torch

import maskconnect as mc
from maskconnect.bench import steps
from maskconnect.bench.arithmetic import Arithmetic
from maskconnect.bench.cases import CASES
from maskconnect.bench.forms import Form
from maskconnect.bench.steps import Result, images, make, time_steps, training_step
from maskconnect.cli.main import main
from maskconnect.ship.measure import Times
from maskconnect.training import options


@pytest.mark.parametrize("name", CASES)
def test_the_plain_network_of_a_case_is_of_the_same_size(name):
    case = CASES[name]
    with torch.device("meta"):
        plain = sum(p.numel() for p in case.plain().parameters())
        ours = mc.count_parameters(case.network("learned")).weights
        if name.startswith("resnext"):  # a batch norm after the sum of branches, not one for each
            layers = case.network("learned").stack.blocks
            ours -= sum(2 * branch.residual[-1].num_features for layer in layers for branch in layer[1:])
    assert plain == ours


def test_a_step_updates_weights_and_masks():
    for variant in ("plain", "frozen", "learning", "blending", "reference"):
        network = make(CASES["resnet38"], variant)
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        training_step(network, 2, Form(layout="channels last", sgd="fused"))()
        changed = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
        assert ("stack.masks.real" in changed) == (variant in ("learning", "blending", "reference"))
        assert len(changed) > len(before) / 2


def test_ratios_are_of_the_same_rounds():
    times = {"plain": Times((1.0, 2.0, 4.0)), "frozen": Times((1.0, 2.0, 8.0)), "learning": Times((3.0, 2.0, 4.0))}
    found = Result(batch=2, forms={}, times=times, arithmetic={}).describe()["ratios"]
    assert found["learning_over_plain"] == {"minima": 2.0, "median": 1.0, "lowest": 1.0, "highest": 3.0}
    assert found["frozen_over_plain"]["highest"] == 2.0


@pytest.mark.parametrize(("name", "side"), [("resnet38", 8), ("resnext29-8-8", 8), ("transformer12", 32)])
def test_a_network_computes_the_same_in_all_forms(name, side, monkeypatch):
    case, after = CASES[name], []
    monkeypatch.setattr(steps, "SIDE", side)
    x, y = images(2)
    monkeypatch.setattr(steps, "images", lambda _: (x.double(), y))
    for form in case.forms:
        network = make(case, "plain").double()
        training_step(network, 2, form)()
        after.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    for weights in after[1:]:
        torch.testing.assert_close(weights, after[0], rtol=1e-6, atol=1e-8)


def test_each_network_is_timed_in_its_fastest_form(monkeypatch):
    seconds = {"channels first, foreach": 3.0, "channels first, fused": 4.0, "channels last, foreach": 1.0}
    tried = []

    def timed(steps_, *_, **__):
        tried.append(list(steps_))
        return {name: Times((seconds.get(name, 2.0),)) for name in steps_}

    monkeypatch.setattr(steps, "interleaved", timed)
    monkeypatch.setattr(steps, "SIDE", 8)
    found = time_steps(CASES["resnet38"], 2, seconds=0)
    assert {str(form) for form in found.forms.values()} == {"channels last, foreach"}
    assert found.describe()["forms"]["plain"] == {"layout": "channels last", "sgd": "foreach"}
    assert len(tried) == 5  # four searches, as `reference` has the form of `learning`; then all variants
    assert tried[-1] == list(CASES["resnet38"].variants)


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "SIDE", 8)
    out = tmp_path / "bench.json"
    assert main(["bench", "resnet38", "--batch", "2", "--seconds", "0", "--threads", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    head, numbers, forms = said.splitlines()[:3]
    assert numbers.startswith("ResNet-38, K=10")
    assert all(word in head for word in ("blending", "reference", "memory", "operations"))
    assert not {"bar", "aim"} & set(said.split()), "limits that tests enforce; they are in the JSON"
    assert "plain" in forms
    assert "channels" in forms
    assert max(map(len, said.splitlines())) <= 125
    found = json.loads(out.read_text())
    assert found["machine"]["threads"] == 1
    assert found["allocator_tuned"]
    (result,) = found["results"]
    assert (result["case"], result["batch"], result["bar"]["time"]) == ("resnet38", 2, None)
    assert set(result["seconds"]) == {"plain", "frozen", "learning", "blending", "reference"}
    plain, learning = (result["arithmetic"][name] for name in ("plain", "learning"))
    assert result["memory_over_plain"]["learning"] == learning["peak"] / plain["peak"] > 1
    assert result["operations_over_plain"]["learning"] == learning["operations"] / plain["operations"] > 1


@pytest.mark.parametrize(("words", "tuned"), [([], 1), (["--own-loop"], 0)])
def test_the_allocator_is_tuned_unless_the_loop_is_your_own(words, tuned, tmp_path, capsys, monkeypatch):
    calls, times = [], dict.fromkeys(CASES["resnet38"].variants, Times((1.0,)))
    monkeypatch.setattr(options, "keep_memory", lambda: calls.append(1))
    monkeypatch.setattr(
        steps,
        "time_steps",
        lambda case, batch, **_: Result(
            batch=batch, forms={}, times=times, arithmetic=dict.fromkeys(times, Arithmetic(peak=1, operations=1))
        ),
    )
    out = tmp_path / "bench.json"
    assert main(["bench", "resnet38", "--batch", "32", *words, "--out", str(out)]) == 0
    assert len(calls) == tuned
    assert json.loads(out.read_text())["allocator_tuned"] == bool(tuned)
    assert ("is not tuned, as in your own training loop" in capsys.readouterr().out) == (not tuned)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resnet39"], "Did you mean 'resnet38'"),
        (["--batch", "1"], "--batch is 1"),
        (["--out", "nowhere/bench.json"], "the folder nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err
