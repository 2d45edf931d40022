"""`maskconnect bench`: training steps beside those of plain networks."""

import json

import pytest
import torch

import maskconnect as mc
from maskconnect.bench import steps
from maskconnect.bench.cases import CASES
from maskconnect.bench.steps import Result, make, training_step
from maskconnect.cli.main import main
from maskconnect.ship.measure import Times


@pytest.mark.parametrize("name", CASES)
def test_the_plain_network_of_a_case_is_of_the_same_size(name):
    case = CASES[name]
    with torch.device("meta"):
        plain = sum(p.numel() for p in case.plain().parameters())
        ours = mc.count_parameters(case.network("learned")).weights
    if name.startswith("resnext"):  # a batch norm after the sum of branches, not one for each
        ours -= 2 * (case.spec.cardinality - 1) * 3 * sum(4 * case.spec.stem_width * 2**s for s in range(3))
    assert plain == ours


def test_a_step_updates_weights_and_masks():
    for variant in ("plain", "frozen", "learning", "blending", "reference"):
        network = make(CASES["resnet38"], variant)
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        training_step(network, 2, torch.channels_last)()
        changed = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
        assert ("stack.masks.real" in changed) == (variant in ("learning", "blending", "reference"))
        assert len(changed) > len(before) / 2


def test_ratios_are_of_the_same_rounds():
    times = {"plain": Times((1.0, 2.0, 4.0)), "frozen": Times((1.0, 2.0, 8.0)), "learning": Times((3.0, 2.0, 4.0))}
    found = Result(batch=2, layouts={}, times=times, arithmetic={}).describe()["ratios"]
    assert found["learning_over_plain"] == {"minima": 2.0, "median": 1.0, "lowest": 1.0, "highest": 3.0}
    assert found["frozen_over_plain"]["highest"] == 2.0


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "SIDE", 8)
    out = tmp_path / "bench.json"
    assert main(["bench", "resnet38", "--batch", "2", "--seconds", "0", "--threads", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "ResNet-38, K=10" in said
    assert "blending" in said
    assert "reference" in said
    found = json.loads(out.read_text())
    assert found["machine"]["threads"] == 1
    (result,) = found["results"]
    assert (result["case"], result["batch"], result["bar"]) == ("resnet38", 2, 1.13)
    assert set(result["seconds"]) == {"plain", "frozen", "learning", "blending", "reference"}
    assert result["arithmetic"]["learning"]["peak"] > result["arithmetic"]["plain"]["peak"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resnet39"], "Did you mean 'resnet38'"),
        (["--batch", "1"], "--batch is 1"),
        (["--out", "nowhere/bench.json"], "there is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err
