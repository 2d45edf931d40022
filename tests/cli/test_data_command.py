import json
import os
import re
import subprocess
import sys

import pytest
import torch

import maskconnect
from maskconnect.cli import data as verbs
from maskconnect.cli.main import main
from maskconnect.data import NAMES, Arrays, Splits, catalog, mini
from maskconnect.data import fetch as fetching
from maskconnect.errors import DataError


def run(capsys, *argv):
    """The exit code, what was printed, and what was complained of."""
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


@pytest.fixture
def folder(tmp_path):
    """Images of a user: 2 cats and 3 dogs to train, 1 and 1 to test."""
    image = pytest.importorskip("PIL.Image")
    for part, counts in (("train", {"cat": 2, "dog": 3}), ("val", {"cat": 1, "dog": 1})):
        for name, count in counts.items():
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (8, 8)).save(tmp_path / part / name / f"{number}.png")
    return tmp_path


@pytest.fixture
def small_cifar(monkeypatch):
    """What `load` is asked for, while it returns five images."""
    asked = []
    images = Arrays(torch.zeros(5, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1, 1, 1, 0]), ("ape", "bee"))

    def load(name, root, **options):
        asked.append((name, root, options))
        return Splits(train=images, test=images.subset(torch.tensor([0, 1])))

    monkeypatch.setattr(catalog, "load", load)
    return asked


def test_list_has_a_line_for_every_set_with_how_to_get_it(capsys):
    code, printed, _ = run(capsys, "data", "list")
    lines = printed.splitlines()[1:]
    assert code == 0
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert lines[1].endswith("pip install 'maskconnect[demo]'")
    assert lines[2].endswith("maskconnect data fetch cifar10 DIR")


def test_the_command_runs_as_a_module():
    ran = subprocess.run(
        [sys.executable, "-m", "maskconnect", "data", "list"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[:2] == ["name", "what"]
    assert ran.stderr == ""


def test_nobody_reading_the_output_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "maskconnect", "data", "list"]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"maskconnect {maskconnect.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        *([], ["demo"], ["train"], ["evaluate"], ["recipes"], ["data"]),
        *(["data", verb] for verb in ("list", "check", "fetch", "build-mini")),
        *(["recipes", verb] for verb in ("show", "check")),
    ],
    ids=" ".join,
)
def test_every_help_has_an_example(capsys, words):
    code, printed, _ = run(capsys, *words, "--help")
    assert code == 0
    assert re.search(rf"examples?:\n  maskconnect {' '.join(words)}", printed)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["dat"], "'data'"),
        (["data", "chekc"], "'check'"),
        (["data", "check", "cifar-10"], "'cifar10'"),
        (["data", "fetch", "fashion_mnist", "x"], "'fashion-mnist'"),
        (["data", "check", "cifar100", "x", "--labels", "coars"], "'coarse'"),
    ],
)
def test_a_mistyped_word_names_the_nearest(capsys, words, near):
    code, printed, complaint = run(capsys, *words)
    assert (code, printed) == (2, "")
    assert complaint.startswith("error: ")
    assert complaint.endswith(f"Did you mean {near}?\n")


@pytest.mark.parametrize(
    "words", [["data"], ["data", "check"], ["data", "list", "--lable"], ["data", "fetch", "cifar10"]]
)
def test_a_command_that_is_not_whole_is_one_line_and_code_2(capsys, words):
    code, _, complaint = run(capsys, *words)
    assert code == 2
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1


def test_check_says_what_is_in_a_set(capsys, small_cifar):
    code, printed, _ = run(capsys, "data", "check", "cifar10", "here")
    assert code == 0
    assert "train:     5 images, 2 classes, 2 (ape) to 3 (bee) per class\n             ape 2, bee 3\n" in printed
    assert "test:      2 images, 2 classes, 1 per class" in printed
    assert "image:     3 x 32 x 32" in printed
    assert "checksums: as published" in printed


def test_check_hands_its_flags_on(capsys, small_cifar, tmp_path):
    _, printed, _ = run(capsys, "data", "check", "cifar100", tmp_path, "--labels", "coarse", "--unverified")
    assert "checksums: not checked" in printed
    assert small_cifar == [("cifar100", tmp_path, {"labels": "coarse", "verified": False})]


def test_check_prints_the_same_as_json(capsys, small_cifar):
    code, printed, _ = run(capsys, "data", "check", "cifar10", "here", "--json")
    ends = {"smallest": {"class": "ape", "images": 2}, "largest": {"class": "bee", "images": 3}}
    assert code == 0
    ends["counts"] = {"ape": 2, "bee": 3}
    assert json.loads(printed)["train"] == {"images": 5, "classes": 2, **ends, "shape": [3, 32, 32], "folder": None}
    assert json.loads(printed)["checksums"] == "as published"


def test_check_of_a_set_that_is_not_there_says_how_to_get_it(capsys, tmp_path):
    code, _, complaint = run(capsys, "data", "check", "cifar10", tmp_path)
    assert code == 2
    assert f"maskconnect data fetch cifar10 {tmp_path}" in complaint


def test_check_decodes_every_file_of_a_folder(capsys, folder):
    code, printed, progress = run(capsys, "data", "check", "folder", folder)
    assert code == 0
    assert "train:     5 images in train/, 2 classes, 2 (cat) to 3 (dog) per class" in printed
    assert "image:" not in printed
    assert progress == "train files: 5 of 5\ntest files: 2 of 2\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_check_names_the_files_that_cannot_be_read(capsys, folder, form):
    (folder / "train" / "dog" / "1.png").write_bytes(b"junk")
    (folder / "val" / "cat" / os.fsdecode(b"\xff.png")).write_bytes(b"junk")  # a name that is not text
    code, printed, complaint = run(capsys, "data", "check", "folder", folder, *form)
    names = ["train/dog/1.png", "val/cat/\udcff.png"]
    assert code == 2
    assert f"error: 2 of the 8 files in {folder} cannot be read" in complaint
    if form:
        assert json.loads(printed)["unreadable"] == names
    else:
        assert printed.endswith("  unreadable: train/dog/1.png\n  unreadable: val/cat/\\udcff.png\n")


def test_fetch_says_how_far_it_is_and_where_the_set_is(capsys, monkeypatch, tmp_path):
    def fetch(name, dest, *, progress, say):
        progress(40_000_000, 170_000_000)
        progress(170_000_000, 170_000_000)
        say(f"{name} is in {dest}.")

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setattr(verbs, "LINE_EVERY", -1)
    code, printed, progress = run(capsys, "data", "fetch", "cifar10", tmp_path)
    assert (code, printed) == (0, f"cifar10 is in {tmp_path}.\n")
    assert progress == "cifar10: 40 of 170 MB\ncifar10: 170 of 170 MB\n"


def test_fetch_shows_a_bar_on_a_terminal(capsys, monkeypatch, tmp_path):
    def fetch(name, dest, *, progress, say):
        progress(170_000_000, 170_000_000)

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    code, _, shown = run(capsys, "data", "fetch", "cifar10", tmp_path)
    assert code == 0
    assert "━━━━" in shown
    assert "170 of 170 MB" in shown


def test_digits_need_neither_a_fetch_nor_a_folder(capsys):
    code, printed, _ = run(capsys, "data", "fetch", "digits")
    assert code == 0
    assert "nothing to fetch" in printed


def test_build_mini_hands_its_arguments_on(capsys, monkeypatch, tmp_path):
    asked = []

    def build_mini(imagenet_root, dest, *, seed, manifest, progress):
        asked.append((imagenet_root, dest, seed, manifest))
        progress(60_000, 60_000)
        return dest

    monkeypatch.setattr(mini, "build_mini", build_mini)
    flags = ("--seed", 3, "--manifest", tmp_path / "manifest.json")
    code, printed, progress = run(capsys, "data", "build-mini", tmp_path / "in", tmp_path / "out", *flags)
    assert (code, asked) == (0, [(tmp_path / "in", tmp_path / "out", 3, tmp_path / "manifest.json")])
    assert f"mini-imagenet is in {tmp_path / 'out'};" in printed
    assert progress == "images: 60,000 of 60,000\n"


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (DataError("two\nlines"), 2, "error: two lines\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            PermissionError(13, "Permission denied", "/there"),
            2,
            "error: /there: Permission denied; fix this and retry.\n",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(capsys, monkeypatch, raised, code, line):
    def load(name, root, **options):
        raise raised

    monkeypatch.setattr(catalog, "load", load)
    assert run(capsys, "data", "check", "digits") == (code, "", line)


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def load(name, root, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(catalog, "load", load)
    with pytest.raises(ZeroDivisionError):
        main(["data", "check", "digits"])


def test_names_of_folders_cannot_fake_lines_or_move_the_cursor(capsys, folder):
    name = "cow\n  checksums: as published\x1b[2J"
    for part in ("train", "val"):
        (folder / part / name).mkdir()
        (folder / part / "cat" / "0.png").rename(folder / part / name / "0.png")
        (folder / part / "cat" / "0\n.png").write_bytes(b"no image")
    code, printed, errors = run(capsys, "data", "check", "folder", folder)
    assert code == 2
    assert "\x1b" not in printed + errors
    assert "as published" not in [line.split(": ")[-1] for line in printed.splitlines()]
    assert "  unreadable: train/cat/0\\n.png" in printed.splitlines()
