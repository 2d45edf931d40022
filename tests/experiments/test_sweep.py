"""`maskconnect sweep`, with real processes."""

import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import runs

from maskconnect.experiments.engine import Local, last_line
from maskconnect.experiments.runner import Runner
from maskconnect.experiments.sweep import claim

SHORT = [f"--set=phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")]


def test_a_grid_is_run_shown_and_not_run_again(recipe, type_in, tmp_path):
    words = ["sweep", recipe, *SHORT, "--fan-in", "1,2", "--jobs", "2", "--out", "grid"]
    code, said, errors = type_in(*words)
    assert (code, errors) == (0, "")
    lines = said.splitlines()
    assert lines[0] == "2 runs in grid, 2 at a time"
    folders = {k: tmp_path / f"grid/fan_in={k}_seed=0" for k in (1, 2)}
    summaries = {k: json.loads((folder / "summary.json").read_text()) for k, folder in folders.items()}
    for k, summary in summaries.items():
        assert summary["fan_in"] == k
        accuracy = f"{summary['test']['top1']:.2f}"
        assert any(line.endswith(f"fan_in={k}_seed=0: test accuracy {accuracy} %") for line in lines)
        assert any(line.split()[:3] == [str(k), "1", accuracy] for line in lines)
    assert lines[-1] == "  maskconnect report grid --out report" or lines[-1].endswith(
        "maskconnect report grid --out report"
    )
    table = (tmp_path / "grid/results.csv").read_text().splitlines()
    assert table[0] == "model.fan_in,seed,top1,top5,parameters,pruned,seconds,folder,failed"
    assert [row.split(",")[2] for row in table[1:]] == [str(s["test"]["top1"]) for s in summaries.values()]
    times = {k: (folder / "summary.json").stat().st_mtime_ns for k, folder in folders.items()}
    code, said, _ = type_in(*words)
    assert code == 0
    assert "2 already finished" in said
    assert {k: (folder / "summary.json").stat().st_mtime_ns for k, folder in folders.items()} == times
    (folders[1] / "summary.json").write_text("{}")
    code, said, _ = type_in("sweep", "./tiny.toml", *SHORT, "--fan-in", "1", "--out", "grid")
    assert code == 1, "a damaged run is a gap"
    assert "summary.json is damaged" in said
    assert len((tmp_path / "grid/results.csv").read_text().splitlines()) == 3, "what other calls found stays"


@pytest.mark.slow
def test_a_cell_is_the_run_that_train_makes_and_seeds_may_be_added(recipe, type_in, tmp_path):
    assert type_in("sweep", recipe, *SHORT, "--seeds", "1", "--threads", "1", "--out", "grid")[0] == 0
    assert type_in("sweep", recipe, *SHORT, "--seeds", "2", "--threads", "1", "--out", "grid")[0] == 0
    assert type_in("train", recipe, *SHORT, "--seed", "1", "--threads", "1", "--out", "alone")[0] == 0
    files, metrics, summary = runs.results(tmp_path / "grid/seed=1")
    assert (files, metrics, summary) == runs.results(tmp_path / "alone")


@pytest.mark.slow
def test_a_cell_that_fails_does_not_stop_the_others(recipe, type_in, tmp_path):
    words = ["sweep", recipe, *SHORT, "--over", "data.name=cifar10,digits", "--out", "grid"]
    code, said, _ = type_in(*words)
    assert code == 1
    assert "name=cifar10_seed=0 FAILED: " in said
    assert "name=digits_seed=0: test accuracy" in said
    last = said.splitlines()[-1]
    assert last.startswith("FAILED name=cifar10_seed=0: ")
    assert "cifar10" in last.partition(": ")[2]
    rows = (tmp_path / "grid/results.csv").read_text().splitlines()
    assert rows[1].startswith("cifar10,0,,,,,,")
    assert (tmp_path / "grid/logs/name=cifar10_seed=0.log").exists()


@pytest.mark.slow
def test_values_that_cannot_work_do_not_stop_others(recipe, type_in, tmp_path):
    """Two seeds fail alike; those that are left have another data set."""
    words = ["--over", "data.name=cifar10,digits", "--seeds", "2", "--out", "grid"]
    code, said, _ = type_in("sweep", recipe, *SHORT, *words)
    assert code == 1
    assert said.count(" FAILED: ") == 2
    assert said.count(": test accuracy") == 2


@pytest.mark.slow
def test_a_recipe_file_that_is_changed_under_way_is_a_gap(recipe, type_in, tmp_path, monkeypatch):
    start = Local.start

    def change_then_start(self, cells, out):
        place = tmp_path / recipe
        if cells[0].recipe.seed == 1:
            place.write_text(place.read_text().replace("train_images = 160", "train_images = 128"))
        return start(self, cells, out)

    monkeypatch.setattr(Local, "start", change_then_start)
    code, said, _ = type_in("sweep", recipe, *SHORT, "--seeds", "2", "--out", "grid")
    assert code == 1
    assert "seed=0: test accuracy" in said
    assert "seed=1 FAILED: grid/seed=1 holds a run of another recipe: data.train_images is 128 there" in said
    assert "--fresh" not in said  # `sweep` has no such option
    assert "--fresh" not in said


def test_a_folder_with_logs_of_others_is_not_a_sweep(recipe, type_in, tmp_path):
    (tmp_path / "project/logs").mkdir(parents=True)
    (tmp_path / "project/thesis.tex").write_text("x")
    code, _, errors = type_in("sweep", recipe, "--out", "project")
    assert code == 2
    assert "exists and does not hold a sweep" in errors


def test_the_reason_for_a_failure_is_the_line_that_names_it():
    said = (
        "phase 1\nTraceback (most recent call last):\n  File 'x'\n    go()\nRuntimeError: boom\nNote: see the manual\n"
    )
    assert last_line(said) == "RuntimeError: boom"
    assert last_line("one\n\nerror: two\n") == "error: two"
    assert last_line("") == ""


def test_what_fails_alike_everywhere_is_not_tried_everywhere(recipe, type_in, tmp_path):
    code, said, errors = type_in("sweep", recipe, "--set", "data.name=cifar10", "--seeds", "5", "--out", "grid")
    assert code == 2
    assert errors.count("\n") == 1
    assert "2 runs failed like this, and the rest differ only in seeds." in errors
    assert said.count("FAILED") == 2
    assert not (tmp_path / "grid/seed=2").exists()


@pytest.mark.slow
def test_a_sweep_that_is_killed_takes_its_runs_along(recipe, tmp_path):
    words = ["sweep", recipe, "--set", "phase.learn.epochs=200", "--threads", "1", "--out", "grid"]
    process = runs.command(*words, cwd=tmp_path)
    metrics = tmp_path / "grid/seed=0/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    log = tmp_path / "grid/logs/seed=0.log"
    while "stopped by SIGTERM" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "stopped by SIGTERM; progress is saved" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_cleanly_and_the_same_command_continues(recipe, type_in, tmp_path, number, expected):
    words = ["sweep", recipe, "--set", "phase.learn.epochs=25", "--seeds", "2", "--jobs", "2", "--threads", "1"]
    words += ["--set", "phase.freeze.epochs=1", "--out", "grid"]
    process = runs.command(*words, cwd=tmp_path)
    metrics = [tmp_path / f"grid/seed={seed}/metrics.jsonl" for seed in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.stat().st_size for path in metrics) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (expected, "")
    assert "progress is saved" in said
    for path in metrics:
        assert list((path.parent / "checkpoints").iterdir()), "each run has saved"
        assert not (path.parent / "summary.json").exists()
    if number == signal.SIGTERM:
        return
    assert type_in(*words)[0] == 0
    logs = (tmp_path / "grid/logs/seed=0.log").read_text()
    assert "resuming from step" in logs


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--over", "model.fanin=1"], "did you mean `model.fan_in`?"),
        (["--fan-in", "1..99"], "fan_in 6 to 99 exceed the 5 candidates of the largest target; use 1..5."),
        (["--fan-in", "2-3"], "model.fan_in is '2-3'; it must be an integer, or a range such as 2..3."),
        (["--jobs", "0"], "--jobs is 0"),
        (["--out", "full"], "exists and does not hold a sweep"),
        (["--seeds", "two"], "--seeds is 'two'"),
        (["--precision", "fp8"], "precision is 'fp8'"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_run(recipe, type_in, tmp_path, words, sentence):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    code, said, errors = type_in("sweep", recipe, *(["--out", "grid"] if "--out" not in words else []), *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert sentence in errors
    assert not (tmp_path / "grid").exists()


def test_a_sweep_that_is_killed_as_it_writes_its_first_file_starts_again(recipe, type_in, tmp_path):
    words = ["sweep", recipe, *SHORT, "--seeds=1", "--out=all", "--threads=1"]
    assert runs.killed_command(words, 1, tmp_path)
    assert {path.name[:9] for path in (tmp_path / "all").iterdir()} == {".lock", ".writing-", "logs"}
    code, _, errors = type_in(*words)
    assert code == 0, errors
    assert not list((tmp_path / "all").glob(".writing-*"))


def test_two_sweeps_do_not_share_a_folder(recipe, type_in, tmp_path):
    with ExitStack() as stack:
        claim({"recipe": str(Path(recipe).resolve()), "settings": ["model.depth=14"], "over": []}, Path("grid"), stack)
        code, _, errors = type_in("sweep", recipe, "--set", "model.depth=14", "--out", "grid")
        assert code == 2
        assert "another sweep is running in grid" in errors
    code, _, errors = type_in("sweep", recipe, "--set", "model.depth=20", "--out", "grid")
    assert code == 2
    assert "grid holds another sweep: it was started with --set model.depth=14, now with --set model.depth=20" in errors
    code, _, errors = type_in("sweep", recipe, "--out", "grid")
    assert (code, "was started with --set model.depth=14, now without --set. More seeds" in errors) == (2, True)
    words = ["--set", "model.depth=14", "--over", "training.momentum=0.5,0.9", "--over", "model.fan_in=1,2"]
    code, _, errors = type_in("sweep", recipe, *words, "--out", "grid")
    assert (code, "without --over, now with --over training.momentum --over model.fan_in." in errors) == (2, True)


@pytest.mark.slow
def test_a_recipe_that_has_changed_is_not_mixed_with_the_old_one(recipe, type_in, tmp_path):
    words = ["sweep", recipe, *SHORT, "--threads", "1", "--out", "grid"]
    assert type_in(*words)[0] == 0
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("batch_size = 32", "batch_size = 16"))
    code, _, errors = type_in(*words)
    assert code == 2
    assert "training.batch_size is 32 there and 16 here" in errors


def test_what_has_started_is_known_if_the_next_run_cannot_start(tmp_path):
    """Otherwise nobody would end it."""

    class Engine:
        def start(self, cells, out):
            yield "job of the first"
            raise OSError("no memory for another process")

    runner = Runner(Engine(), tmp_path, [object(), object()], 2, show=None, requests=None, kept=None)
    with pytest.raises(OSError, match="no memory"):
        runner.start(2)
    assert runner.running == ["job of the first"]
