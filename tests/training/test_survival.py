"""Stopped anywhere, a run resumes from its last checkpoint and ends as if it had never been stopped."""

import random
import signal
import time

import pytest
import runs
import torch

from maskconnect.training.progress import Silent
from maskconnect.training.stop import Stopped


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runs.run(runs.tiny(folder), folder / "run")
    return runs.results(folder / "run")


class CrashError(Exception):
    pass


class CrashAt(Silent):
    """Fails after a given step."""

    def __init__(self, step):
        self.step = step

    def progress(self, now):
        if now.step == self.step:
            raise CrashError


@pytest.mark.parametrize("step", [1, 4, 5, 7, 10, 11, 17, 25, 30])
def test_a_run_that_fails_after_a_step_ends_as_one_that_did_not(step, tmp_path, never_stopped):
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"
    with pytest.raises(CrashError):
        runs.run(recipe, out, CrashAt(step), checkpoint_every=0)
    torch.manual_seed(99)  # the process that resumes is another
    runs.run(recipe, out)
    assert runs.results(out) == never_stopped


def test_a_run_without_a_checkpoint_in_the_middle_resumes_from_the_end_of_a_phase(tmp_path, never_stopped):
    recipe, out, said = runs.tiny(tmp_path), tmp_path / "run", []

    class Listening(Silent):
        def line(self, text):
            said.append(text)

    with pytest.raises(CrashError):
        runs.run(recipe, out, CrashAt(17))
    runs.run(recipe, out, Listening())
    assert said[1] == "resuming from step 10 of 30"
    assert runs.results(out) == never_stopped


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_killed_again_and_again_ends_as_one_that_was_not(seed, tmp_path, never_stopped):
    """SIGKILL at random moments: while data are read, in a step, in an evaluation, while a checkpoint is written."""
    runs.tiny(tmp_path)
    out, chance = tmp_path / "run", random.Random(seed)
    arguments = ("train", tmp_path / "tiny.toml", "--out", out, "--checkpoint-every", "0", "--threads", "1")
    kills = 0
    while not (out / "summary.json").exists():
        process = runs.command(*arguments)
        if kills < 4:
            deadline = time.monotonic() + 60
            before = len(list(out.glob("checkpoints/step-*")))
            while kills and process.poll() is None and time.monotonic() < deadline:
                if len(list(out.glob("checkpoints/step-*"))) != before or chance.random() < 0.002:
                    break
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.4 if kills else 3))
            process.kill()
            kills += 1
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), errors
    assert kills >= 2
    assert runs.results(out) == never_stopped


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_saves_and_says_how_to_resume(number, code, tmp_path, never_stopped):
    runs.tiny(tmp_path)
    out = tmp_path / "run"
    arguments = ("train", tmp_path / "tiny.toml", "--out", out, "--threads", "1", "--log-every", "1")
    process = runs.command(*arguments)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    resume = f"maskconnect train {out}/recipe.toml --out {out} --threads 1 --log-every 1"
    assert f"stopped by {number.name}; progress is saved. To resume: {resume}\n" in said
    assert errors == ""
    steps = [line["step"] for line in runs.metrics(out)]
    (saved,) = out.glob("checkpoints/step-*") if steps[-1] < 10 else [max(out.glob("checkpoints/step-*"))]
    assert int(saved.name.removeprefix("step-")) == steps[-1]  # the very step, not the last one of a phase

    said, errors = runs.command(*resume.split()[1:]).communicate(timeout=60)
    assert f"resuming from step {steps[-1]:,} of 30" in said
    files, _, summary = runs.results(out)
    assert files.keys() == never_stopped[0].keys()
    assert {name for name in files if files[name] != never_stopped[0][name]} == set()
    assert summary == never_stopped[2]


def test_a_stop_in_an_evaluation_is_a_stop_too(tmp_path, never_stopped, monkeypatch):
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"
    for after in (
        1,
        3,
        2,
        3,
        5,
    ):  # of epoch 1, at the freeze (drawn masks, then frozen ones), of epoch 3, the final one
        stop_in_evaluation(monkeypatch, after)
        with pytest.raises(Stopped):
            runs.run(recipe, out)
        monkeypatch.undo()
    runs.run(recipe, out)
    assert runs.results(out) == never_stopped


def stop_in_evaluation(monkeypatch, after):
    """Ask a run to stop while a network is judged for the so-manieth time in this process."""
    from maskconnect.training import evaluation

    calls, before = 0, evaluation.predict

    def predict(*arguments):
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGTERM)
        return before(*arguments)

    monkeypatch.setattr(evaluation, "predict", predict)


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path, never_stopped):
    recipe, out, said = runs.tiny(tmp_path), tmp_path / "run", []
    with pytest.raises(CrashError):
        runs.run(recipe, out, CrashAt(8), checkpoint_every=0)
    newest = max(out.glob("checkpoints/step-*")) / "state.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)

    class Listening(Silent):
        def line(self, text):
            said.append(text)

    runs.run(recipe, out, Listening())
    assert "step-000000007 cannot be used" in said[0]
    assert said[2] == "resuming from step 6 of 30"
    assert runs.results(out) == never_stopped
