"""Runs on images in files, which worker processes decode."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from maskconnect.errors import ConfigError, DataError, LostWorkerError

RECIPE = """
[data]
name = "folder"
[augmentation]
size = 16
flip = true
mean = [0.5, 0.5, 0.5]
std = [0.25, 0.25, 0.25]
area = [0.5, 1.0]
test_shorter = 18
[model]
architecture = "resnext"
depth = 11
width = 4
cardinality = 2
fan_in = 1
[training]
batch_size = 8
weight_decay = 1e-4
norm_group = 4
[[phase]]
name = "learn"
epochs = 2
lr = 0.05
mask_lr = 0.2
[[phase]]
name = "freeze"
epochs = 1
lr = 0.05
"""


@pytest.fixture
def folder(tmp_path):
    """Dark and bright pictures of many sizes."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 12), ("val", 4)):
        for level, name in ((60, "dark"), (200, "bright")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                size = (20 + 3 * number, 40 - number)
                image.effect_noise(size, 40).point(lambda v, level=level: (v + level) // 2).convert("RGB").save(
                    tmp_path / part / name / f"{number}.jpg"
                )
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def recipe_of(folder):
    from maskconnect.recipes import load

    return load(str(folder / "recipe.toml"))


def test_workers_and_stops_change_nothing(folder):
    recipe, found = recipe_of(folder), []
    runs.run(recipe, folder / "whole", data=folder)
    for workers in (0, 2):
        out = folder / f"stopped{workers}"

        class Stop(runs.Silent):
            def progress(self, now):
                if now.step == 4:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            runs.run(recipe, out, Stop(), data=folder, workers=workers, checkpoint_every=0)
        runs.run(recipe, out, data=folder, workers=workers)
        found.append(runs.results(out))
    assert found[0] == found[1] == runs.results(folder / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_workers_too_is_a_clean_stop(number, code, folder):
    """Ctrl-C in a terminal, or the end of a job on a cluster, reaches every process of the group."""
    out = folder / "run"
    words = ("train", folder / "recipe.toml", "--data", folder, "--out", out, "--workers", "2", "--threads", "1")
    settings = ("--set", "phase.learn.epochs=2000", "--log-every", "1")
    process = runs.command(*words, *settings, start_new_session=True)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, number)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")
    assert "progress is saved" in said


@pytest.mark.parametrize(
    ("left_out", "fields"),
    [("area", "augmentation.area or augmentation.shorter"), ("test_shorter", "augmentation.test_shorter")],
)
def test_files_that_nothing_says_how_to_cut_are_an_error_that_names_the_field(left_out, fields, folder):
    lines = [line for line in RECIPE.splitlines() if not line.startswith(left_out)]
    (folder / "recipe.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        runs.run(recipe_of(folder), folder / "run", data=folder)
    assert f"Set {fields}, or " in str(caught.value)
    assert "in_memory" not in str(caught.value)


def test_files_of_several_sizes_without_a_mean_are_an_error_that_names_the_fields(folder):
    lines = [line for line in RECIPE.splitlines() if not line.startswith(("mean", "std", "area", "test_shorter"))]
    (folder / "recipe.toml").write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"set augmentation\.mean to numbers, and augmentation\.area or augmentation\.sh"
    ):
        runs.run(recipe_of(folder), folder / "run", data=folder)


def loaders(process):
    """The processes that a process has started."""
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in found.read_text().split()] if found.exists() else []


def test_a_worker_that_is_killed_ends_a_run_in_one_sentence_with_a_checkpoint(folder):
    """As the kernel does where memory runs out."""
    out = folder / "run"
    words = ("train", folder / "recipe.toml", "--data", folder, "--out", out, "--workers", "2", "--threads", "1")
    settings = ("--set", "phase.learn.epochs=2000", "--log-every", "1")
    process = runs.command(*words, *settings)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    while process.poll() is None:  # one that is killed between two epochs is not missed
        for number in loaders(process.pid):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=60)
    (saved,) = out.glob("checkpoints/step-*")
    step = int(saved.name.removeprefix("step-"))
    assert (process.returncode, errors) == (
        1,
        "error: a process that loads images was killed, perhaps because memory ran out; set --workers below 2 and "
        f"start again to resume from step {step:,}.\n",
    )
    assert step == [line["step"] for line in runs.metrics(out) if line["kind"] == "step"][-1]


def test_a_run_that_has_lost_a_worker_continues_to_the_same_result(folder):
    recipe, out = recipe_of(folder), folder / "run"

    class Kill(runs.Silent):
        def progress(self, now):
            if now.step == 1:  # of six; the loader has asked for two more by now, which may have come
                for worker in multiprocessing.active_children():
                    worker.kill()

    with pytest.raises(LostWorkerError, match=r"to resume from step [123]\."):
        runs.run(replace(recipe, training=replace(recipe.training, batch_size=4)), out, Kill(), data=folder, workers=1)
    for place, workers in ((out, 0), (folder / "whole", 1)):
        runs.run(replace(recipe, training=replace(recipe.training, batch_size=4)), place, data=folder, workers=workers)
    assert runs.results(out) == runs.results(folder / "whole")
