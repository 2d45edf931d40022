"""`mc.Recorder` in a folder that was used before: resumed, held, refused or damaged."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from recordings import TwoStacks, content, lines, shown_wiring, shuffled
from torch import nn

import maskconnect as mc
from maskconnect.report.recorded import read_any


def test_a_folder_is_never_overwritten_unless_it_is_resumed(recorded):
    place, model = recorded
    before = content(place)
    with pytest.raises(mc.ConfigError, match="already holds a recording of 3 epochs; pass resume=True"):
        mc.Recorder(model, place)
    with pytest.raises(mc.ConfigError, match="a recording of another model"):
        mc.Recorder(mc.resnet(14, 10, fan_in=2), place, resume=True)
    with pytest.raises(mc.ConfigError, match=r"resume is 4; it must be from 0 to 3"):
        mc.Recorder(model, place, resume=4)
    assert content(place) == before
    (place.parent / "thesis").mkdir()
    (place.parent / "thesis/thesis.tex").write_text("x")
    with pytest.raises(mc.ConfigError, match="is not empty and holds no recording"):
        mc.Recorder(model, place.parent / "thesis", resume=True)
    assert [path.name for path in (place.parent / "thesis").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (2, "resume is 2, but .*new/run holds no recording; pass the folder of one, or resume=True"),
        (-1, "resume is -1; it must be True, False, or the number of epochs to keep"),
        ("yes", "resume is 'yes'; it must be an integer"),
        (1.0, "resume is 1.0; it must be an integer"),
    ],
)
def test_there_must_be_as_many_epochs_as_resume_says(tmp_path, resume, words):
    with pytest.raises(mc.ConfigError, match=words):
        mc.Recorder(TwoStacks(), tmp_path / "new/run", resume=resume)
    assert not (tmp_path / "new").exists()


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


def test_a_checkpoint_may_be_loaded_after_its_recording_is_resumed(tmp_path):
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        recorder.epoch()
        mc.freeze(model)
        for _ in range(2):
            recorder.step(loss=1.0)
            recorder.epoch()
    fresh = TwoStacks()
    with mc.Recorder(fresh, tmp_path / "run", resume=True) as recorder:
        fresh.load_state_dict(model.state_dict())
        recorder.step(loss=1.0)
        recorder.epoch()
    assert [line["freeze"] for line in lines(tmp_path / "run")] == [None, 1, 1, 1]
    assert json.loads((tmp_path / "run/summary.json").read_text())["freeze"] == 1


def test_connections_change_from_the_last_epoch_of_a_resumed_recording(tmp_path):
    torch.manual_seed(0)
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        model.load_state_dict(shuffled(model))
        recorder.epoch()
    fresh = TwoStacks()
    with mc.Recorder(fresh, tmp_path / "run", resume=True) as recorder:
        fresh.load_state_dict(model.state_dict())
        recorder.epoch()
    first, second = (line["top_changes"] for line in lines(tmp_path / "run"))
    assert first > 0
    assert second == 0


def test_a_resumed_recording_that_is_closed_at_once_keeps_its_masks(tmp_path):
    torch.manual_seed(0)
    model = TwoStacks()
    with mc.Recorder(model, tmp_path / "run") as recorder:
        model.load_state_dict(shuffled(model))
        recorder.epoch()
    mc.Recorder(TwoStacks(), tmp_path / "run", resume=True).close()
    assert shown_wiring(tmp_path / "run") == mc.wiring_of(model)


HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"


def test_two_processes_do_not_share_a_folder(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(mc.ConfigError, match="another process records in"):
            mc.Recorder(TwoStacks(), tmp_path)
        holder.communicate()
    mc.Recorder(TwoStacks(), tmp_path).close()


def test_a_recorder_of_the_same_process_that_is_still_open_must_be_closed_first(tmp_path):
    model = TwoStacks()
    forgotten = mc.Recorder(model, tmp_path / "run")
    with pytest.raises(mc.ConfigError, match=r"an open recorder of this process records in .*run; call its close\(\)"):
        mc.Recorder(model, tmp_path / "run", resume=True)
    forgotten.close()
    mc.Recorder(model, tmp_path / "run", resume=True).close()


def test_a_folder_is_released_if_its_end_cannot_be_recorded(tmp_path):
    model = TwoStacks()
    with pytest.raises(mc.ConfigError) as kept, mc.Recorder(model, tmp_path / "run") as recorder:
        recorder.step(accuracy=97.0)
    assert "accuracy is 97" in str(kept.value)
    mc.Recorder(model, tmp_path / "run", resume=True).close()


def test_a_folder_is_released_if_its_start_cannot_be_recorded(recorded):
    place, model = recorded
    (place / "environment.json").unlink()
    (place / "environment.json").mkdir()
    with pytest.raises(OSError, match=r"environment\.json") as kept:
        mc.Recorder(model, place, resume=True)
    assert kept.value is not None, "as in a notebook, the frames of the error still exist"
    (place / "environment.json").rmdir()
    mc.Recorder(model, place, resume=True).close()


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("oops", "Expecting value"),
        ("[1]", "it must be a table"),
        ('{"kind": "epoch"}', "it has no step"),
        (
            '{"kind": "epoch", "epoch": 2, "step": 0, "seconds": 0, "freeze": null, "test": {}}',
            "it must be 1, the next",
        ),
    ],
)
def test_a_recording_with_a_damaged_line_is_not_resumed_and_not_changed(recorded, line, words):
    place, model = recorded
    found = (place / "metrics.jsonl").read_text().splitlines()
    (place / "metrics.jsonl").write_text("\n".join([found[0], line, *found[2:], ""]))
    before = content(place)
    with pytest.raises(
        mc.CheckpointError, match=rf"line 2 of .*metrics\.jsonl is damaged: .*{words}.*Remove this line"
    ):
        mc.Recorder(model, place, resume=True)
    assert content(place) == before


@pytest.mark.parametrize("how", ["a description that is cut", "no masks", "masks that are cut"])
def test_a_recording_with_a_damaged_file_is_not_resumed(recorded, how):
    place, model = recorded
    DAMAGE[how](place)
    before = content(place)
    with pytest.raises(mc.CheckpointError, match=str(place)):
        mc.Recorder(model, place, resume=1)
    assert content(place) == before


def test_a_copy_of_a_file_of_masks_is_left_alone(recorded):
    place, model = recorded
    copy = place / "masks/epoch-0001 (1).safetensors"
    copy.write_bytes((place / "masks/epoch-0001.safetensors").read_bytes())
    assert [frame.epoch for frame in read_any(place).frames] == [0, 1, 2]
    mc.Recorder(model, place, resume=0).close()
    assert copy.exists()
    assert [frame.epoch for frame in read_any(place).frames] == [0]


def test_later_masks_are_removed_only_after_the_metrics(recorded, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    place, model = recorded
    before = content(place)
    monkeypatch.setattr("os.truncate", fail)
    with pytest.raises(OSError, match="the disk is full"):
        mc.Recorder(model, place, resume=1)
    assert content(place) == before
