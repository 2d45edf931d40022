"""On what a run runs."""

import ctypes
import json
import platform

import pytest
import runs

from maskconnect.errors import ConfigError
from maskconnect.training.options import Options, keep_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_can_be_told_to_keep_memory():
    assert keep_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    def without(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", without)
    assert keep_memory() is False


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"compile": True}])
def test_lean_goes_with_single_precision_only(other):
    with pytest.raises(ConfigError, match="--lean works neither"):
        Options(lean=True, **other)


def test_a_lean_run_ends_as_one_that_is_not(tmp_path):
    settings = ("model.architecture=resnext", "model.depth=20", "model.width=2", "model.cardinality=3")
    recipe = runs.tiny(tmp_path, *settings)
    runs.run(recipe, tmp_path / "lean", lean=True)
    runs.run(recipe, tmp_path / "usual")
    assert runs.metrics(tmp_path / "lean") == runs.metrics(tmp_path / "usual")


def test_data_are_waited_for_a_small_part_of_the_time(tmp_path):
    runs.run(runs.tiny(tmp_path), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    waiting = [line["waiting_for_data"] for line in lines if line["kind"] == "epoch"]
    assert len(waiting) == 6
    assert all(0 < share < 50 for share in waiting)
