"""`maskconnect prune`: what a person types, and what comes of it."""

import json

import pytest
import torch
from runs import run, tiny

import maskconnect as mc
from maskconnect.core.prune import difference, pruned_parameters
from maskconnect.ship import saved
from maskconnect.ship.pruning import Measures, prune_saved
from maskconnect.ship.trained import from_run

QUICK = ["--seconds", "0", "--batches", "1", "--draws", "20", "--threads", "1"]


def test_a_run_is_pruned_measured_and_saved(learned, type_in, tmp_path):
    out = tmp_path / "slim"
    code, said, errors = type_in("prune", learned, "--out", out, *QUICK)
    assert code == 0, errors
    for words in ("one-step rule", "million multiply-adds", "ms, batch 1", "Random wiring of the same K", "Saved in"):
        assert words in said
    model, found = from_run(learned), saved.read(out)
    counts, report = pruned_parameters(model.network), json.loads((out / "report.json").read_text())
    assert report["parameters"]["frozen"] == counts.weights
    assert report["parameters"]["one_step"] == counts.one_step
    assert report["parameters"]["transitive"] == counts.transitive
    assert report["parameters"]["written"] == sum(p.numel() for p in found.network.parameters())
    assert report["macs"]["pruned"] <= report["macs"]["frozen"] <= report["macs"]["plain"]
    assert report["difference"] <= report["allowed"] == 1e-4
    assert [timing["batch"] for timing in report["latency"]] == [1]
    assert report["latency"][0]["pruned_over_frozen"] > 0
    assert report["random_wiring"]["draws"] == 20
    assert (found.kind, found.classes) == ("pruned", model.classes)
    assert found.preprocessing.describe() == model.preprocessing.describe()
    x = torch.randn(5, 1, 8, 8)
    assert difference(model.network, found.network, x) < 1e-4
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in found.network.modules())


def test_norms_and_names_stay_where_that_is_asked_for_and_json_is_json(learned, type_in, tmp_path):
    code, said, _ = type_in("prune", learned, "--out", tmp_path / "a", "--no-fold", "--no-merge", "--json", *QUICK)
    assert code == 0
    report = json.loads(said)
    assert report["allowed"] == 1e-5
    assert report["parameters"]["written"] == report["parameters"]["transitive"]
    network = mc.load(tmp_path / "a")
    assert network.state_dict().keys() < from_run(learned).network.state_dict().keys()


def test_nothing_is_replaced_unless_that_is_said(learned, type_in, tmp_path):
    out = tmp_path / "slim"
    out.mkdir()
    assert type_in("prune", learned, "--out", out, *QUICK)[0] == 0, "an empty folder"
    before = (out / "report.json").read_text()
    code, _, errors = type_in("prune", learned, "--out", out, *QUICK)
    assert (code, errors.count("\n")) == (2, 1)
    assert "--overwrite" in errors
    assert (out / "report.json").read_text() == before
    assert type_in("prune", learned, "--out", out, "--overwrite", "--no-fold", *QUICK)[0] == 0
    assert (out / "report.json").read_text() != before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--draws", "1"], "draws is 1"),
        (["--batches", "0"], "batches are [0]"),
        (["--seconds", "-1"], "seconds is -1.0"),
        (["--bathces", "1"], "did you mean --batches?"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(learned, type_in, tmp_path, words, sentence):
    code, _, errors = type_in("prune", learned, "--out", tmp_path / "slim", *words)
    assert code == 2
    assert sentence in errors.splitlines()[-1]
    assert not (tmp_path / "slim").exists()


def test_what_is_no_finished_run_is_refused(type_in, tmp_path):
    code, _, errors = type_in("prune", tmp_path / "nothing")
    assert (code, "does not exist" in errors) == (2, True)
    (tmp_path / "recipe.toml").write_text("")
    code, _, errors = type_in("prune", tmp_path)
    assert (code, errors.count("\n")) == (2, 1)


def test_a_saved_network_is_pruned_once(learned, type_in, tmp_path):
    found = from_run(learned)
    mc.save(found.network, tmp_path / "frozen", classes=found.classes, preprocessing=found.preprocessing)
    assert type_in("prune", tmp_path / "frozen", *QUICK)[0] == 0, "into frozen/pruned"
    code, _, errors = type_in("prune", tmp_path / "frozen" / "pruned", "--out", tmp_path / "b", *QUICK)
    assert (code, "pruned already" in errors) == (2, True)
    mc.save(found.network, tmp_path / "bare")
    code, _, errors = type_in("prune", tmp_path / "bare", *QUICK)
    assert (code, "nothing says what pictures this network reads" in errors) == (2, True)
    mc.save(mc.resnet(8, 10, 2, in_channels=1), tmp_path / "learned", preprocessing=found.preprocessing)
    code, _, errors = type_in("prune", tmp_path / "learned", *QUICK)
    assert (code, "still being learned" in errors) == (2, True)


def test_a_resnext_is_compared_with_plain_resnext(tmp_path):
    settings = ["architecture=resnext", "depth=11", "width=2", "cardinality=3", "fan_in=1"]
    recipe = tiny(tmp_path, *(f"model.{setting}" for setting in settings))
    run(recipe, tmp_path / "run")
    pruned, report = prune_saved(
        from_run(tmp_path / "run"), fold=True, merge=True, measures=Measures(batches=(), draws=10)
    )
    plain = mc.resnext(11, 2, 3, 10, connectivity="full", in_channels=1)
    assert report.parameters["frozen"] == mc.count_parameters(plain).weights
    assert report.modules[0] == 9
    assert report.modules[1] == sum(plain_alive(from_run(tmp_path / "run").network))
    assert report.macs["pruned"] <= report.macs["frozen"]
    assert pruned.kind == "pruned"


def plain_alive(network):
    return network.stack.masks.settled().alive
