"""`maskconnect prune`: what a person types, and what comes of it."""

import json

import pytest
import runs
import torch
from runs import run, tiny

import maskconnect as mc
from maskconnect.pruning.prune import difference, pruned_parameters
from maskconnect.ship import saved
from maskconnect.ship.pruning import Measures, prune_saved, report_of
from maskconnect.ship.trained import from_run

QUICK = ["--seconds", "0", "--batches", "1", "--draws", "20", "--threads", "1"]
"""Timing and counting as short as can be."""


def test_a_run_is_pruned_measured_and_saved(learned, type_in, tmp_path):
    out = tmp_path / "slim"
    code, said, errors = type_in("prune", learned, "--out", out, *QUICK)
    assert code == 0, errors
    for words in (
        "one-step rule",
        "million multiply-adds",
        "ms at batch 1",
        "Random wiring of the same K",
        "Saved the network",
    ):
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
    assert report["plain"] == "ResNet-14"
    assert report["accuracy"]["frozen"] == report["accuracy"]["pruned"] == summary_of(learned)["test"]["top1"]
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
        (["--draws", "-1"], "draws is -1"),
        (["--batches", "0"], "batches are [0]"),
        (["--batches", "1,x"], "--batches is '1,x'"),
        (["--seconds", "-1"], "seconds is -1.0"),
        (["--bathces", "1"], "did you mean --batches?"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(learned, type_in, tmp_path, words, sentence):
    code, _, errors = type_in("prune", learned, "--out", tmp_path / "slim", *words)
    assert code == 2
    assert sentence in errors.splitlines()[-1]
    assert not (tmp_path / "slim").exists()


def test_what_is_not_a_finished_run_is_refused(type_in, tmp_path):
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
    assert (code, "already pruned" in errors) == (2, True)
    mc.save(found.network, tmp_path / "bare")
    code, _, errors = type_in("prune", tmp_path / "bare", *QUICK)
    assert (code, "this network has no preprocessing" in errors) == (2, True)
    mc.save(mc.resnet(8, 10, 2, in_channels=1), tmp_path / "learned", preprocessing=found.preprocessing)
    code, _, errors = type_in("prune", tmp_path / "learned", *QUICK)
    assert (code, "still being learned" in errors) == (2, True)


def test_a_resnext_is_compared_with_plain_resnext(tmp_path):
    settings = ["architecture=resnext", "depth=11", "width=2", "cardinality=3", "fan_in=1"]
    recipe = tiny(tmp_path, *(f"model.{setting}" for setting in settings))
    run(recipe, tmp_path / "run")
    before = from_run(tmp_path / "run")
    pruned, apart = prune_saved(before, fold=True, merge=True)
    report = report_of(before, pruned, apart, Measures(batches=(), draws=0), fold=True, merge=True)
    assert report.plain == "ResNeXt {11,2,3}"
    assert report.random is None
    plain = mc.resnext(11, 2, 3, 10, connectivity="full", in_channels=1)
    assert report.parameters["frozen"] == mc.count_parameters(plain).weights
    assert report.modules["frozen"] == report.modules["plain"] == 9
    assert report.modules["pruned"] == sum(plain_alive(from_run(tmp_path / "run").network))
    assert report.macs["pruned"] <= report.macs["frozen"]
    assert pruned.kind == "pruned"


def plain_alive(network):
    return network.stack.masks.current_wiring().alive


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_a_folder_that_holds_something_else_is_left_alone(learned, type_in, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for out, words in ((tmp_path / "mine", "does not hold a saved network"), (learned, "is a run folder")):
        before = sorted(out.iterdir())
        code, _, errors = type_in("prune", learned, "--out", out, "--overwrite", *QUICK)
        assert (code, words in errors) == (2, True)
        assert sorted(out.iterdir()) == before
    (tmp_path / "file").write_text("")
    code, _, errors = type_in("prune", learned, "--out", tmp_path / "file" / "a", *QUICK)
    assert (code, "cannot be written" in errors) == (2, True)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("moment", [1, pytest.param(2, marks=SLOW), pytest.param(7, marks=SLOW)])
def test_a_prune_that_is_killed_as_it_writes_starts_again(moment, learned, type_in, tmp_path):
    """The first file; after it; and, when the network is whole, the report."""
    words = ["prune", learned, "--out", "slim", *QUICK]
    assert runs.killed_command(words, moment, tmp_path)
    code, _, errors = type_in(*words)
    assert code == 0, errors
    names = {path.name.replace("-2", "") for path in (tmp_path / "slim").iterdir()}
    assert names == {"maskconnect.json", "model.safetensors", "input.safetensors", "report.json"}
    assert type_in(*words)[0] == 2, "a network that is whole is not replaced"


def test_a_report_is_never_that_of_another_network(learned, type_in, tmp_path, monkeypatch):
    out = tmp_path / "slim"
    assert type_in("prune", learned, "--out", out, *QUICK)[0] == 0

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("maskconnect.ship.pruning.report_of", interrupted)
    assert type_in("prune", learned, "--out", out, "--overwrite", "--no-fold", *QUICK)[0] == 130
    assert not (out / "report.json").exists()
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in mc.load(out).modules()), "the new one was saved"


def test_what_does_not_fit_into_memory_is_one_sentence(learned, type_in, tmp_path):
    words = ["--batches", "10000000000", "--draws", "0", "--seconds", "0"]
    code, _, errors = type_in("prune", learned, "--out", tmp_path / "slim", *words)
    assert (code, "out of memory" in errors.splitlines()[-1]) == (2, True)
    assert mc.load(tmp_path / "slim"), "saved before it was timed"


def test_places_with_spaces_can_be_pasted(learned, type_in, tmp_path):
    _, said, _ = type_in("prune", learned, "--out", tmp_path / "a b", *QUICK)
    assert f"maskconnect predict '{tmp_path / 'a b'}'" in said


def test_evaluate_says_what_to_do_with_a_saved_network(learned, type_in, tmp_path):
    mc.save(from_run(learned).network, tmp_path / "saved")
    code, _, errors = type_in("evaluate", tmp_path / "saved")
    assert (code, "is a saved network" in errors) == (2, True)
