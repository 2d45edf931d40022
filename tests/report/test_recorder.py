"""`mc.Recorder`: your own training loop, recorded and shown."""

import json
from textwrap import dedent

import pytest
import torch
from recordings import TwoStacks, lines, optimizer_of, shown_wiring, shuffled, train
from torch import nn

import maskconnect as mc
from maskconnect.core.lookup import masks_of
from maskconnect.report import charts
from maskconnect.report.page import page
from maskconnect.report.recorded import find_all, read_any
from maskconnect.report.recorder import Recorder


def test_the_files_are_those_of_a_run(recorded):
    place, model = recorded
    assert json.loads((place / "wiring.json").read_text()) == mc.wiring_of(model)
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["epochs"], summary["steps"], summary["freeze"]) == (3, 9, 2)
    assert summary["test"] == {"top1": 75.0}
    assert summary["best"] == {"epoch": 3, "chosen_on": "test", "test": {"top1": 75.0}}
    assert summary["parameters"]["weights"] == mc.count_parameters(model).weights
    assert sorted(path.name for path in (place / "masks").iterdir()) == [f"epoch-000{k}.safetensors" for k in range(3)]
    assert [line["step"] for line in lines(place, "step")] == [2, 5, 8]
    assert all(0 <= line["mask_entropy"] <= 1 for line in lines(place, "step"))
    epochs = lines(place)
    assert [line["lr"] for line in epochs] == [0.1] * 3
    assert [line["mask_lr"] for line in epochs] == [0.05, 0.05, None]
    assert [line["mask_decay"] for line in epochs] == [pytest.approx(0.6), 0.0, None]


def test_the_page_shows_stacks_phases_and_curves_and_nothing_that_needs_a_recipe(recorded, visit):
    place, model = recorded
    page = visit(read_any(place))
    assert page.locator("h1").inner_text() == "Learned: TwoStacks"
    assert page.locator(".player h4").all_inner_texts()[:2] == ["chain", "layers"]
    first = page.locator(".player").first
    assert first.locator(".phases span").all_inner_texts() == ["learn", "fine-tune"]
    assert first.locator(".wiring .block text").all_text_contents() == ["Linear", "Tanh", "Linear", "ReLU", "Linear"]
    assert first.locator("output").inner_text() == "epoch 3 of 3: wiring frozen"
    first.locator("input[type=range]").fill("1")
    assert first.locator("output").inner_text() == "epoch 1 of 3: learning"
    titles = page.locator("figure.chart figcaption").all_inner_texts()
    assert titles[:3] == ["Loss", "Accuracy", "Learning rates"]
    headings = page.locator("h3").all_inner_texts()
    assert headings == ["Wiring", "Training", "Origin"]
    for stack, wires in zip((model.chain, model.layers), read_any(place).stacks, strict=True):
        assert stack.layout.to_plain(wires.wires.sources) == stack.wiring()


def test_it_stands_beside_runs_of_recipes(recorded, folder, visit, type_in, tmp_path):
    place, _ = recorded
    code, said, errors = type_in("report", place, folder / "learned", "--out", tmp_path / "both")
    assert code == 0, errors
    assert "2 runs" in said
    page = visit(read_any(place), read_any(folder / "learned"))
    rows = page.locator("section:not(.run) tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["Learned (mine)", "Learned, K=2"]
    assert "75.00" in rows[0]
    note = "Accuracies are on digits; the data of recorded runs is unknown."
    assert note in page.locator("section:not(.run)").inner_text()
    assert find_all([place.parent]) == [place]
    assert find_all([folder, place])[-1] == place


def test_means_are_over_the_steps_of_an_epoch_and_any_value_has_a_chart(tmp_path):
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        for loss in (1.0, torch.tensor(3.0, requires_grad=True)):
            recorder.step(loss=loss, accuracy=torch.tensor(0.25), gate_use=2)
        recorder.epoch(loss=float("nan"), gate_use=5.0, perplexity=7.0)
    (line,) = lines(tmp_path / "run")
    assert (line["loss"], line["accuracy"], line["test"]) == (2.0, 25.0, {"loss": None})
    run = read_any(tmp_path / "run")
    by_key = {chart.key: chart for chart in charts.curves(run)}
    assert [chart for chart in by_key if chart.startswith("value-")] == ["value-gate_use", "value-perplexity"]
    assert [(part.name, part.y) for part in by_key["value-gate_use"].lines] == [("train", (2.0,)), ("test", (5.0,))]
    assert "rates" not in by_key


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("trains_on", [True, False])
def test_the_page_shows_the_wiring_of_a_checkpoint_that_was_loaded_at_the_end(tmp_path, freezes, trains_on):
    torch.manual_seed(0)
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        recorder.step(loss=1.0)
        recorder.epoch()
        model.load_state_dict(shuffled(model))
        if freezes:
            mc.freeze(model)
        if trains_on:
            recorder.step(loss=1.0)
    assert shown_wiring(tmp_path / "run") == mc.wiring_of(model)
    assert json.loads((tmp_path / "run/wiring.json").read_text()) == mc.wiring_of(model)
    assert read_any(tmp_path / "run").freeze == (1 if freezes else None)
    assert [frame.epoch for frame in read_any(tmp_path / "run").frames] == (
        [0, 1, 2] if trains_on > freezes else [0, 1]
    )


def test_recorded_and_trained_runs_are_found_side_by_side_at_any_depth(tmp_path):
    names = "demo/a/recipe.toml", "demo/b/c/recording.json", "mine/recording.json", ".old/recording.json"
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert find_all([tmp_path]) == [tmp_path / name for name in ("demo/a", "demo/b/c", "mine")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(mc.ConfigError, match=r"neither it nor a folder in it has a recipe\.toml or recording\.json"):
        find_all([tmp_path, tmp_path / "empty"])


def test_a_run_without_an_epoch_has_no_slider(tmp_path):
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        assert "type=range" not in page([read_any(tmp_path / "run")])
        recorder.epoch()
        assert "type=range min=0 max=1 value=1" in page([read_any(tmp_path / "run")])


def test_an_accuracy_in_percent_has_no_digits_of_its_conversion(tmp_path):
    with mc.Recorder(TwoStacks(), tmp_path / "run") as recorder:
        recorder.epoch(accuracy=0.55)
    assert lines(tmp_path / "run")[0]["test"] == {"top1": 55.0}


def test_an_error_in_the_loop_leaves_a_run_that_has_not_ended(tmp_path):
    def fail():
        with mc.Recorder(TwoStacks(), tmp_path / "run") as recorder:
            recorder.epoch()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert read_any(tmp_path / "run").summary is None


def test_fixed_wirings_and_rewired_models_are_recorded(tmp_path, visit):
    fixed = mc.MaskedStack([nn.Linear(2, 2) for _ in range(4)], connectivity="prev")
    with mc.Recorder(fixed, tmp_path / "fixed") as recorder:
        recorder.epoch(accuracy=1)
    run = read_any(tmp_path / "fixed")
    assert run.wiring == "Fixed wiring, K=1"
    assert run.wires.sources == ((), (0,), (1,), (2,))
    page = visit(run)
    assert page.locator("input[type=range]").count() == 0
    assert "Mask value" not in page.locator("main").inner_text()
    rewired = mc.rewire(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), "", fan_in=2)
    optimizer = optimizer_of(rewired)
    with mc.Recorder(rewired, tmp_path / "rewired", optimizer=optimizer) as recorder:
        train(rewired, optimizer, recorder, epochs=1)
    assert read_any(tmp_path / "rewired").wiring == "Learned, K=2"
    assert visit(read_any(tmp_path / "rewired")).locator(".wiring .block").count() == 5


def test_a_stack_whose_output_reads_every_block_has_none_to_prune(tmp_path, visit):
    model = mc.MaskedStack([nn.Linear(4, 4) for _ in range(4)], fan_in=1, aggregation="stream")
    with mc.Recorder(model, tmp_path / "run") as recorder:
        recorder.epoch()
    run = read_any(tmp_path / "run")
    page = visit(run)
    assert all(run.wires.alive)
    assert page.locator(".wiring .unused").count() == 0
    assert "The output reads every block." in page.locator(".count").inner_text()
    assert "The output also reads every block." in page.locator(".charts").inner_text()


def test_only_allowed_candidates_are_listed(tmp_path, visit):
    allowed = [[], [0], [0, 1], [0, 2]]
    model = mc.MaskedStack([nn.Linear(4, 4) for _ in range(4)], fan_in=1, wiring=allowed)
    with mc.Recorder(model, tmp_path / "run") as recorder:
        recorder.epoch()
    page = visit(read_any(tmp_path / "run"))
    page.locator(".wiring .block[data-k='3']").hover()
    assert page.locator(".panel summary").inner_text() == "1 rejected candidate"
    shown = {text.split()[0] for text in page.locator(".panel li").all_inner_texts()}
    assert shown == {"0", "2"}


def test_masks_within_a_budget_are_shown_as_they_are_used(tmp_path):
    torch.manual_seed(0)
    model = mc.MaskedStack([nn.Linear(4, 4) for _ in range(8)], fan_in=2)
    optimizer = optimizer_of(model, steps=4, keep=0.6)
    with mc.Recorder(model, tmp_path / "run", optimizer=optimizer) as recorder:
        train(model, optimizer, recorder, epochs=1)
        assert read_any(tmp_path / "run").wires.sources == masks_of(model)[0].current_wiring().sources


def test_steps_after_the_last_epoch_are_one_more(tmp_path):
    recorder = mc.Recorder(TwoStacks(), tmp_path / "run")
    recorder.step(loss=2.0)
    recorder.close()
    recorder.close()
    assert [line["loss"] for line in lines(tmp_path / "run")] == [2.0]
    with pytest.raises(mc.ConfigError, match="this recorder is closed"):
        recorder.step(loss=1.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"accuracy": 93.0}, "accuracy is 93; it must be between 0 and 1. Divide a percentage by 100."),
        ({"loss": torch.ones(3)}, "loss has 3 elements; pass a single number"),
        ({"loss": "low"}, "loss is 'low'; it must be a number"),
    ],
)
def test_a_value_of_another_kind_is_one_sentence(tmp_path, values, words):
    with pytest.raises(mc.ConfigError, match=words), mc.Recorder(TwoStacks(), tmp_path / "run") as recorder:
        recorder.epoch(**values)


def test_what_cannot_be_recorded_is_said_at_once(tmp_path):
    with pytest.raises(mc.ConfigError, match="no MaskedStack"):
        mc.Recorder(nn.Linear(2, 2), tmp_path / "run")
    with pytest.raises(mc.ConfigError, match="every is 0; it must be 1 or more"):
        mc.Recorder(TwoStacks(), tmp_path / "run", every=0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(mc.ConfigError, match="cannot be written"):
        mc.Recorder(TwoStacks(), tmp_path / "file")
    assert not (tmp_path / "run").exists()


def test_the_example_in_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = dedent(Recorder.__doc__.partition("```python\n")[2].partition("```")[0])
    model = mc.MaskedStack([nn.Linear(2, 2) for _ in range(4)], fan_in=1)
    loader = [(torch.randn(2, 2), None)]
    names = {"mc": mc, "model": model, "loader": loader, "optimizer": optimizer_of(model)}
    exec(code, names | {"loss": torch.tensor(1.0), "accuracy": 0.5})
    assert read_any(tmp_path / "runs/mine").done == 10


def test_values_have_names_of_their_own(tmp_path):
    with mc.Recorder(TwoStacks(), tmp_path / "mine") as recorder:
        with pytest.raises(mc.ConfigError, match=r"lr is recorded by mc\.Recorder itself; choose another name"):
            recorder.step(loss=1.0, lr=0.1)
        recorder.step(loss=1.0)


def test_an_accuracy_that_is_not_a_number_is_not_recorded_as_perfect(tmp_path):
    with mc.Recorder(TwoStacks(), tmp_path / "mine") as recorder:
        recorder.step(loss=float("nan"), accuracy=float("nan"))
        recorder.epoch(accuracy=float("nan"))
    assert lines(tmp_path / "mine")[0]["accuracy"] is None
    assert lines(tmp_path / "mine")[0]["test"] == {"top1": None}
