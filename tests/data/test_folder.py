"""Class folders become labeled files, in an order that does not depend on the disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from maskconnect.data import folder as module
from maskconnect.data.decode import decode
from maskconnect.data.folder import read_folder, unreadable
from maskconnect.data.sets import Files
from maskconnect.errors import DataError

Image = pytest.importorskip("PIL.Image")


def write(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG" if path.suffix.lower() == ".png" else "JPEG")


def damage(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.fixture
def tree(tmp_path):
    """Two classes, with two images each to train and one to test."""
    for name in ("dog", "cat"):
        write(tmp_path / "train" / name / "2.png")
        write(tmp_path / "train" / name / "1.JPEG")
        write(tmp_path / "val" / name / "3.jpg")
    return tmp_path


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_classes_and_files_are_sorted_and_labeled_by_their_folders(tree):
    splits = read_folder(tree)
    assert splits.train.classes == splits.test.classes == ("cat", "dog")
    assert splits.train.names == ("train/cat/1.JPEG", "train/cat/2.png", "train/dog/1.JPEG", "train/dog/2.png")
    torch.testing.assert_close(splits.train.labels, torch.tensor([0, 0, 1, 1]))
    assert splits.test.names == ("val/cat/3.jpg", "val/dog/3.jpg")
    torch.testing.assert_close(splits.test.labels, torch.tensor([0, 1]))
    assert splits.validation is None


def test_names_are_relative_to_the_root_and_lead_to_the_images(tree):
    files = read_folder(tree).train
    assert [decode(files.root / name).shape for name in files.names] == [(6, 5, 3)] * 4


def test_a_root_may_be_given_as_text(tree):
    assert len(read_folder(str(tree)).train) == 4


def test_images_at_any_depth_and_with_any_case_of_suffix_are_found_and_other_files_are_not(tree):
    for name in ("train/dog/a/b/4.PNG", "train/dog/a/5.JpEg", "train/dog/a/6.JPG"):
        write(tree / name)
    for name in (
        "train/dog/notes.txt",
        "train/dog/._7.jpg",
        "train/dog/.cache/8.jpg",
        "train/.hidden/9.jpg",
        "train/x.md",
    ):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("no image")
    splits = read_folder(tree)
    assert splits.train.classes == ("cat", "dog")
    assert splits.train.names[2:] == tuple(
        f"train/dog/{name}" for name in ("1.JPEG", "2.png", "a/5.JpEg", "a/6.JPG", "a/b/4.PNG")
    )


def test_links_are_followed_but_not_in_circles(tree):
    (tree / "elsewhere").mkdir()
    write(tree / "elsewhere" / "4.png")
    (tree / "train" / "dog" / "more").symlink_to(tree / "elsewhere")
    (tree / "train" / "dog" / "again").symlink_to(tree / "train" / "dog")
    names = [name for name in read_folder(tree).train.names if "dog" in name]
    assert names == ["train/dog/1.JPEG", "train/dog/2.png", "train/dog/more/4.png"]


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_with_validation_and_test_images_in_classes_each_is_what_it_says(tree, validation):
    (tree / "val").rename(tree / validation)
    for name in ("cat", "dog"):
        write(tree / "test" / name / "3.jpg")
    splits = read_folder(tree)
    assert {name.split("/")[0] for name in splits.validation.names} == {validation}
    assert {name.split("/")[0] for name in splits.test.names} == {"test"}


def test_test_images_are_taken_where_there_are_no_others(tree):
    (tree / "val").rename(tree / "test")
    assert read_folder(tree).test.names == ("test/cat/3.jpg", "test/dog/3.jpg")


def test_a_root_that_is_missing_is_an_error_that_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist; .*train/ and val/.*image-net\.org"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is not a folder; "):
        read_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("missing", "message"), [("train", "no folder train/"), ("val", "no folder val/, validation/")]
)
def test_a_missing_half_is_an_error(tree, missing, message):
    (tree / missing).rename(tree / "other")
    with pytest.raises(DataError, match=message):
        read_folder(tree)


def test_a_half_without_class_folders_is_an_error(tree):
    (tree / "train").rename(tree / "other")
    (tree / "train").mkdir()
    with pytest.raises(DataError, match="train has no class folders; "):
        read_folder(tree)


def test_validation_images_in_no_class_folders_are_an_error_that_says_to_sort_them(tree):
    (tree / "val").rename(tree / "other")
    write(tree / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(DataError, match="no class folders; sort the validation images into one folder per class"):
        read_folder(tree)


@pytest.mark.parametrize("half", ["train", "val"])
def test_an_empty_class_is_an_error_that_names_it(tree, half):
    remove(tree / half / "dog")
    (tree / half / "dog").mkdir()
    (tree / half / "dog" / "readme.txt").write_text("soon")
    with pytest.raises(DataError, match=f"class 'dog' has no images in .*{half}"):
        read_folder(tree)


def test_a_class_that_is_only_tested_is_an_error_that_names_it(tree):
    write(tree / "val" / "cow" / "1.png")
    write(tree / "val" / "hen" / "1.png")
    with pytest.raises(DataError, match=r"class 'cow' \(and 1 more\) is in .*val but not in .*train"):
        read_folder(tree)


def test_a_class_that_is_never_tested_is_an_error_that_names_it(tree):
    remove(tree / "val" / "dog")
    with pytest.raises(DataError, match=r"class 'dog' is in .*train but not in .*val;"):
        read_folder(tree)


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(tree, monkeypatch):
    (tree / "train" / "dog" / "locked").mkdir()
    scandir = os.scandir

    def locked(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(DataError, match=r"locked cannot be listed \(Permission denied\)"):
        read_folder(tree)


def test_a_damaged_file_is_an_error_only_when_it_is_decoded(tree):
    damage(tree / "train" / "dog" / "1.JPEG")
    files = read_folder(tree).train
    assert len(files) == 4
    with pytest.raises(DataError, match=r"train/dog/1\.JPEG is not a readable"):
        decode(files.root / files.names[2])


def test_damaged_files_among_good_ones_are_found_by_name(tree):
    damage(tree / "train" / "dog" / "1.JPEG")
    (tree / "train" / "cat" / "2.png").write_bytes(b"")
    seen = []
    found = unreadable(read_folder(tree).train, progress=lambda done, total: seen.append((done, total)))
    assert found == ["train/cat/2.png", "train/dog/1.JPEG"]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_worker_processes_find_the_same_files(tree, monkeypatch):
    for number in range(80):  # more than a worker is handed at once
        write(tree / "train" / "cat" / "more" / f"{number:02d}.png")
    bad = [f"train/cat/more/{number}.png" for number in (11, 40, 79)]
    for name in bad:
        (tree / name).write_bytes(b"")
    files = read_folder(tree).train
    assert unreadable(files) == bad
    monkeypatch.setattr(module, "MANY", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module, "_bad", spied := Spy(module._bad))
    assert unreadable(files) == bad
    assert spied.verdicts is not map  # but the results of a pool


class Spy:
    """Calls a function, and notes what kind of verdicts it was handed."""

    def __init__(self, function):
        self.function = function

    def __call__(self, names, verdicts, progress):
        self.verdicts = type(verdicts)
        return self.function(names, verdicts, progress)


def test_a_script_without_a_guard_says_what_is_missing(tree):
    script = tree / "script.py"
    script.write_text(
        "import os; os.cpu_count = lambda: 2\n"
        "from maskconnect.data import folder; folder.MANY = 1\n"
        f"folder.read_folder({str(tree)!r}, skip_unreadable=True)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "images in" in done.stderr
    assert 'call this under `if __name__ == "__main__":`' in done.stderr


def test_skip_unreadable_leaves_the_damaged_files_out(tree):
    damage(tree / "train" / "dog" / "1.JPEG")
    with pytest.warns(UserWarning, match=r"1 files in .* are skipped: train/dog/1\.JPEG"):
        splits = read_folder(tree, skip_unreadable=True)
    assert splits.train.names == ("train/cat/1.JPEG", "train/cat/2.png", "train/dog/2.png")
    torch.testing.assert_close(splits.train.labels, torch.tensor([0, 0, 1]))
    assert len(splits.test) == 2


def test_a_test_folder_without_classes_is_left_alone(tree):
    (tree / "test").mkdir()
    (tree / "test" / "1.png").write_bytes((tree / "train" / "cat" / "2.png").read_bytes())
    splits = read_folder(tree)
    assert splits.validation is None
    assert {name.split("/")[0] for name in splits.test.names} == {"val"}


@pytest.mark.filterwarnings("ignore:1 files in")
def test_a_class_of_damaged_files_only_is_an_error_that_names_it(tree):
    damage(tree / "val" / "dog" / "3.jpg")
    with pytest.raises(DataError, match=r"class 'dog' has no readable image; .*val/dog/3\.jpg"):
        read_folder(tree, skip_unreadable=True)


def test_a_set_of_no_files_has_none_that_are_unreadable(tmp_path):
    assert unreadable(Files(tmp_path, (), torch.zeros(0, dtype=torch.int64), ())) == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_among_images_is_unreadable_and_no_hang(tree, kind, type_in):
    for part in ("train", "val"):
        place = next(path for path in (tree / part).iterdir() if path.is_dir()) / "endless.png"
        os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero")
    code, said, errors = type_in("data", "check", "folder", tree)
    assert code == 2
    assert said.count("unreadable: ") == 2
    assert "2 of the" in errors.splitlines()[-1]
    with pytest.raises(DataError, match=r"endless\.png cannot be read"):
        decode(place)
