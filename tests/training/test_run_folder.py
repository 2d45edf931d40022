"""Whose a run folder is, and what it holds."""

import json
from dataclasses import replace

import pytest
import runs
import torch

from maskconnect.errors import ConfigError, DataError
from maskconnect.training.folder import find_runs
from maskconnect.training.options import Options
from maskconnect.training.progress import Silent


def _stop_at_12(_, now):
    if now.step == 12:
        raise KeyboardInterrupt


def test_a_run_that_has_ended_is_not_run_again(learned, tmp_path):
    before = (learned / "metrics.jsonl").stat().st_mtime_ns
    summary = runs.run(runs.tiny(tmp_path), learned)
    assert summary == json.loads((learned / "summary.json").read_text())
    assert (learned / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_folder_of_another_recipe_is_an_error_that_names_the_difference(learned, tmp_path):
    with pytest.raises(ConfigError, match=r"model.fan_in is 2 there and 3 here.*--out.*--fresh"):
        runs.run(runs.tiny(tmp_path, "model.fan_in=3"), learned)
    with pytest.raises(ConfigError, match=r"phase.freeze.epochs is 2 there and 1 here"):
        runs.run(runs.tiny(tmp_path, "phase.freeze.epochs=1"), learned)
    with pytest.raises(ConfigError, match=r"seed is 0 there and 1 here"):
        runs.run(runs.tiny(tmp_path, seed=1), learned)


def test_another_text_about_a_recipe_is_not_another_recipe(tmp_path, learned):
    recipe = replace(runs.tiny(tmp_path), about="in other words")
    assert runs.run(recipe, learned)["steps"] == 30


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path):
    recipe, out = runs.tiny(tmp_path), tmp_path / "letters"
    out.mkdir()
    (out / "letter.txt").write_text("hello")
    with pytest.raises(ConfigError, match="is not empty and does not hold a run"):
        runs.run(recipe, out)
    assert [path.name for path in out.iterdir()] == ["letter.txt"]


def test_only_leftovers_of_the_run_itself_are_removed(tmp_path):
    foreign = tmp_path / "letters" / ".writing-x"
    foreign.parent.mkdir()
    foreign.touch()
    with pytest.raises(ConfigError, match="does not hold a run"):
        runs.run(runs.tiny(tmp_path), foreign.parent)
    assert foreign.exists()


def test_a_run_that_is_killed_as_it_writes_its_first_file_starts_again(tmp_path):
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"
    assert runs.killed_command(["train", "tiny.toml", "--out=run"], 1, tmp_path)
    assert {path.name[:9] for path in out.iterdir()} == {".lock", ".writing-"}
    runs.run(recipe, out)
    assert (out / "summary.json").exists()
    assert not list(out.glob(".writing-*"))


def test_two_processes_in_one_folder_are_an_error(tmp_path):
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"

    class Second(Silent):
        def progress(self, now):
            with pytest.raises(ConfigError, match="another process is training in"):
                runs.run(recipe, out)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(recipe, out, Second())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    recipe = runs.tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"tiny.toml/run cannot be written"):
        runs.run(recipe, tmp_path / "tiny.toml" / "run")


def test_a_file_in_place_of_the_folder_is_an_error_that_asks_for_a_folder(tmp_path):
    recipe = runs.tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"tiny.toml is a file; name a folder"):
        runs.run(recipe, tmp_path / "tiny.toml")
    assert (tmp_path / "tiny.toml").read_text() == runs.TINY


def made(*places):
    """Folders that look like runs."""
    for place in places:
        place.mkdir(parents=True)
        (place / "recipe.toml").touch()


def test_runs_are_found_at_any_usual_depth_and_in_order(tmp_path):
    places = "a sweep/K=2", "a sweep/K=10", "alone", "b/c/d/deep"
    others = ".old/run", "a sweep/.old", "alone/final/copy", "b/c/d/e/too deep"
    made(*(tmp_path / place for place in (*reversed(places), *others)))
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path]) == [tmp_path / place for place in places]
    assert find_runs([tmp_path / "alone", tmp_path / "a sweep", tmp_path]) == [
        tmp_path / place for place in ("alone", "a sweep/K=2", "a sweep/K=10", "b/c/d/deep")
    ]
    assert find_runs([tmp_path / ".old"]) == [tmp_path / ".old/run"]
    with pytest.raises(ConfigError, match="empty holds no run"):
        find_runs([tmp_path / "empty"])


def test_a_wrong_start_does_not_keep_the_folder(tmp_path, learned):
    with pytest.raises(ConfigError):
        runs.run(runs.tiny(tmp_path, init_from="nowhere"), tmp_path / "run")
    runs.run(runs.tiny(tmp_path, init_from=str(learned)), tmp_path / "run")


def test_other_images_than_a_run_began_with_are_refused(tmp_path):
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"

    with pytest.raises(KeyboardInterrupt):
        runs.run(recipe, out, type("Later", (Silent,), {"progress": _stop_at_12})())
    kept = json.loads((out / "data.json").read_text())
    (out / "data.json").write_text(json.dumps(kept | {"train": {"images": 170, "sha256": "0"}}))
    with pytest.raises(DataError, match=r"the train images differ from those of this run \(170 then, 160 now\)"):
        runs.run(recipe, out)
    (out / "data.json").write_text(json.dumps(kept | {"classes": ["a", "b"]}))
    with pytest.raises(DataError, match="the classes differ from those that this run was trained on"):
        runs.run(recipe, out)


def test_going_on_with_other_threads_is_said(tmp_path):
    recipe, out, said = runs.tiny(tmp_path), tmp_path / "run", []

    class Listening(Silent):
        def progress(self, now):
            if now.step == 12 and not said:
                raise KeyboardInterrupt

        def line(self, text):
            said.append(text)

    with pytest.raises(KeyboardInterrupt):
        runs.run(recipe, out, type("Quiet", (Listening,), {"line": lambda *_: None})())
    said.append("")
    try:
        runs.train(recipe, out, Options(threads=2), Listening())
    finally:
        torch.set_num_threads(1)
    assert "note: threads was 1 and is 2, so the result will not be bitwise identical" in said


def test_the_environment_is_written_down(learned):
    (start,) = json.loads((learned / "environment.json").read_text())
    assert start["packages"]["torch"] == torch.__version__
    assert start["threads"] == 1
    assert start["from_step"] == 0


def test_curves_are_there_for_tensorboard(learned):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(learned / "tensorboard")).Reload()
    top1 = [(event.step, round(event.value, 3)) for event in found.Scalars("test/top1")]
    assert top1 == [(line["step"], round(line["test"]["top1"], 3)) for line in runs.epochs_of(learned)]


def test_tensorboard_keeps_what_came_before_the_checkpoint(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe, out = runs.tiny(tmp_path), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        runs.run(recipe, out, type("Later", (Silent,), {"progress": _stop_at_12})())
    runs.run(recipe, out)
    found = events.EventAccumulator(str(out / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("test/top1")] == [5, 10, 15, 20, 25, 30]
