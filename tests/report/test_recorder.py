"""`mc.Recorder`: your own training loop, recorded and shown."""

import json
import signal
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.core.lookup import masks_of
from maskconnect.report import charts
from maskconnect.report.recorded import find_all, read_any
from maskconnect.report.recorder import Recorder


class TwoStacks(nn.Module):
    """A chain of unlike blocks, and layers of equal ones."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
        self.chain = mc.MaskedStack(blocks, fan_in=2)
        self.layers = mc.MaskedStack([[nn.Linear(4, 4) for _ in range(3)] for _ in range(3)], fan_in=1)

    def forward(self, x):
        return self.layers(self.chain(x))


def optimizer_of(model, **how):
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.05))
    mc.attach(optimizer, model, mc.Blend(**how) if how else None)
    return optimizer


def train(model, optimizer, recorder, *, epochs, steps=3, accuracy=0.5):
    for _ in range(epochs):
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)
        recorder.epoch(accuracy=accuracy)


def lines(place, kind="epoch"):
    found = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


@pytest.fixture
def recorded(tmp_path):
    """A recording of two epochs of learning and one of fine-tuning, and its model."""
    torch.manual_seed(0)
    model = TwoStacks()
    optimizer = optimizer_of(model, steps=6, decay=True)
    with mc.Recorder(model, tmp_path / "mine", optimizer=optimizer, every=2) as recorder:
        train(model, optimizer, recorder, epochs=2)
        mc.freeze(model)
        train(model, optimizer, recorder, epochs=1, accuracy=0.75)
    return tmp_path / "mine", model


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


def test_a_folder_is_never_overwritten_unless_it_is_resumed(recorded):
    place, model = recorded
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(mc.ConfigError, match="already holds a recording of 3 epochs; pass resume=True"):
        mc.Recorder(model, place)
    with pytest.raises(mc.ConfigError, match="a recording of another model"):
        mc.Recorder(mc.resnet(14, 10, fan_in=2), place, resume=True)
    with pytest.raises(mc.ConfigError, match=r"resume is 4; it must be from 0 to 3"):
        mc.Recorder(model, place, resume=4)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    (place.parent / "thesis").mkdir()
    (place.parent / "thesis/thesis.tex").write_text("x")
    with pytest.raises(mc.ConfigError, match="is not empty and holds no recording"):
        mc.Recorder(model, place.parent / "thesis", resume=True)


def test_a_recording_resumes_after_its_last_epoch_or_an_earlier_one(recorded):
    place, model = recorded
    with mc.Recorder(model, place, resume=True) as recorder:
        assert not (place / "summary.json").exists(), "the run has not ended"
        recorder.step(loss=1.0)
        recorder.epoch(accuracy=0.6)
    assert [line["epoch"] for line in lines(place)] == [1, 2, 3, 4]
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["steps"], summary["freeze"], summary["best"]["epoch"]) == (10, 2, 3)
    with mc.Recorder(TwoStacks(), place, resume=1) as recorder:
        recorder.epoch()
    assert [line["epoch"] for line in lines(place)] == [1, 2]
    assert [frame.epoch for frame in read_any(place).frames] == [0, 1, 2]
    assert json.loads((place / "summary.json").read_text())["freeze"] is None
    with mc.Recorder(model, place.parent / "new", resume=True) as recorder:
        recorder.epoch()
    assert read_any(place.parent / "new").done == 1, "with nothing to resume, it starts"


KILLED = """
import os, signal, sys, torch, maskconnect as mc
torch.manual_seed(0)
model = mc.MaskedStack([torch.nn.Linear(2, 2) for _ in range(4)], fan_in=1)
recorder = mc.Recorder(model, sys.argv[1], every=1)
for epoch in range(3):
    recorder.step(loss=float(epoch))
    recorder.epoch(accuracy=0.1 * epoch)
recorder.step(loss=9.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_loses_only_its_epoch(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "run"], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "ep')
    run = read_any(tmp_path / "run")
    assert (run.done, run.summary) == (3, None)
    torch.manual_seed(0)
    model = mc.MaskedStack([nn.Linear(2, 2) for _ in range(4)], fan_in=1)
    with mc.Recorder(model, tmp_path / "run", resume=True) as recorder:
        recorder.epoch(accuracy=0.9)
    assert [line["epoch"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert len(lines(tmp_path / "run", "step")) == 3, "the step of the lost epoch is gone"


def test_two_recorders_do_not_share_a_folder(tmp_path):
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run"), pytest.raises(mc.ConfigError, match="another process records in"):
        mc.Recorder(model, tmp_path / "run", resume=True)


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


DAMAGE = {
    "a description that is cut": lambda run: (run / "recording.json").write_text("{"),
    "a description of another kind": lambda run: (run / "recording.json").write_text('{"model": 3, "stacks": []}'),
    "candidates that cannot be": lambda run: (run / "recording.json").write_text(
        (run / "recording.json").read_text().replace('"layered": true', '"layered": false')
    ),
    "no masks": lambda run: [path.unlink() for path in (run / "masks").iterdir()],
    "masks that are cut": lambda run: (run / "masks/epoch-0001.safetensors").write_bytes(b"x"),
    "metrics of another kind": lambda run: (run / "metrics.jsonl").write_text("[1]\n"),
    "a summary of words": lambda run: (run / "summary.json").write_text('{"epochs": "many"}'),
}


@pytest.mark.parametrize("how", DAMAGE, ids=str)
def test_a_damaged_recording_is_one_sentence(recorded, type_in, how):
    place, _ = recorded
    DAMAGE[how](place)
    code, _, errors = type_in("report", place, "--no-figures")
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: ")
    assert str(place) in errors


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
