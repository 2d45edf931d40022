"""Valid files of the wrong kind in the folder of a run: one sentence from every verb, and never a traceback."""

import contextlib
import json
import os
import shutil

import pytest
import runs
import torch
from PIL import Image

from maskconnect.errors import CheckpointError, MaskConnectError
from maskconnect.training.files import load_tensors, save_tensors
from maskconnect.training.folder import RunFolder

DEEP = "[" * 400 + "]" * 400
PLAIN = ["null", "[]", "{}", "3", '"x"', "[1]", '{"a": 1}', '[["a"]]', "NaN", "1e999", DEEP, "[" * 100_000, "{", ""]
INNER = [None, [], {}, 3, "x", -1, True, 1e40, 10**400, [[]], {"top1": "x"}, {"images": None}]


def verbs(run, other, picture):
    """Every verb that reads the folder of a run."""
    return (
        ("train", run / "recipe.toml", "--out", run, "--threads", "1"),
        ("evaluate", run, "--threads", "1"),
        ("report", run, "--out", run.parent / "report", "--no-figures"),
        ("compare", run, other),
        ("compare", other, run, "--parameters", "--json"),
        (
            "prune",
            run,
            "--out",
            run.parent / "pruned",
            "--overwrite",
            "--draws",
            "0",
            "--batches",
            "",
            "--threads",
            "1",
        ),
        ("predict", run, picture, "--device", "cpu"),
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Another run to compare with, and a picture."""
    folder = tmp_path_factory.mktemp("others")
    runs.run(runs.tiny(folder, "model.connectivity=prev", "phase.learn.epochs=1"), folder / "prev")
    Image.new("L", (8, 8)).save(folder / "picture.png")
    return folder / "prev", folder / "picture.png"


@pytest.fixture
def run(learned, tmp_path):
    """A copy of a finished run, for whoever damages it."""
    return shutil.copytree(learned, tmp_path / "run")


def expect_one_sentence(type_in, words):
    """No traceback, and where the verb cannot do without the file, one sentence and code 2."""
    code, _, errors = type_in(*words)
    assert code in (0, 2)
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == (code == 2)
    return code


def expect_one_sentence_from_all(type_in, run, others):
    assert 2 in [expect_one_sentence(type_in, words) for words in verbs(run, *others)]


@pytest.mark.parametrize("content", PLAIN, ids=lambda content: content[:8] or "empty")
@pytest.mark.parametrize("name", ["summary.json", "data.json", "final/classes.json", "wiring.json"])
def test_json_of_the_wrong_type_is_one_sentence_from_every_verb(type_in, run, others, name, content):
    (run / name).write_text(content)
    expect_one_sentence_from_all(type_in, run, others)


def put(kind, place):
    """Something that is not a file."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()


def readers(folder):
    return (folder.summary, folder.data, folder.classes, folder.wiring, folder.mean, lambda: folder.predictions(10))


def paths_in(found, path=()):
    """The places of all values in plain data."""
    for key in found if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ():
        yield (*path, key)
        yield from paths_in(found[key], (*path, key))


@pytest.mark.parametrize("name", ["summary.json", "data.json"])
def test_a_value_of_another_type_anywhere_is_found_when_it_is_read(run, name):
    whole = (run / name).read_text()
    read = {"summary.json": RunFolder(run).summary, "data.json": RunFolder(run).data}[name]
    refused = 0
    for path in list(paths_in(json.loads(whole))):
        for value in ("x", [], {}, True, -1, 10**400, 1e40):
            found = json.loads(whole)
            inner = found
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            (run / name).write_text(json.dumps(found))
            with contextlib.suppress(CheckpointError):
                read()
                continue
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("value", INNER, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("key", ["test", "best", "parameters", "freeze", "seconds", "skipped"])
def test_a_summary_with_a_part_of_another_type_is_one_sentence(type_in, run, others, key, value):
    found = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(found | {key: value}))
    for words in (verbs(run, *others)[0], verbs(run, *others)[4]):
        expect_one_sentence(type_in, words)


TENSORS = {
    "nothing": {},
    "a number": {"mean": torch.tensor(1.0), "label": torch.tensor(1), "class": torch.tensor(1)},
    "no images": {name: torch.zeros(0) for name in ("mean", "label", "class", "probability", "wrong")},
    "one axis": {name: torch.zeros(60) for name in ("mean", "label", "class", "probability", "wrong")},
    "five axes": {name: torch.zeros(1, 1, 1, 1, 1) for name in ("mean", "label", "class", "probability", "wrong")},
    "integers": {"mean": torch.zeros(1, 8, 8, dtype=torch.int64), "label": torch.zeros(60, 2, dtype=torch.int64)},
    "another size": {"mean": torch.zeros(1, 7, 7), "class": torch.zeros(59, 5, dtype=torch.int64)},
    "more channels": {"mean": torch.zeros(3, 8, 8), "probability": torch.zeros(60, 4)},
    "not finite": {"mean": torch.full((1, 8, 8), torch.nan), "label": torch.full((60,), 11)},
    "classes below 0": {"mean": torch.zeros(1, 0, 8), "label": torch.full((60,), -1)},
    "images that are none": {"mean": torch.zeros(0, 8, 8), "wrong": torch.full((3,), 60)},
    "no ranks": {"mean": torch.zeros(2, 8, 8), "class": torch.zeros(60, 0, dtype=torch.int64)},
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("file", ["final/input.safetensors", "final/predictions.safetensors"])
def test_tensors_of_the_wrong_kind_are_one_sentence_from_every_verb(type_in, run, others, file, name):
    own = load_tensors(run / file)
    changed = {key: value for key, value in TENSORS[name].items() if key in own}
    save_tensors(run / file, own | changed if changed else {"other": torch.zeros(1)})
    expect_one_sentence_from_all(type_in, run, others)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_of_a_run_that_is_none_is_an_error_and_no_hang(run, kind):
    names = ("summary.json", "data.json", "final/classes.json", "wiring.json", "final/input.safetensors")
    for name in (*names, "final/predictions.safetensors"):
        (run / name).unlink()
        put(kind, run / name)
    for read in readers(RunFolder(run)):
        with pytest.raises(MaskConnectError, match="cannot be read"):
            read()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "environment.json", "recipe.toml"])
def test_a_run_does_not_continue_in_a_folder_with_a_pipe(type_in, run, name):
    (run / "summary.json").unlink()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    expect_one_sentence(type_in, ("train", run.parent / "tiny.toml", "--out", run, "--threads", "1"))


@pytest.mark.parametrize("line", ["[1]", "3", DEEP, '{"kind": "epoch"}', '{"kind": "epoch", "epoch": 1e999}'])
def test_metrics_of_the_wrong_type_are_one_sentence(type_in, run, others, line):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert expect_one_sentence(type_in, verbs(run, *others)[2]) == 2
