"""Mini-ImageNet, read in either of its forms, and made from ImageNet again and again."""

import hashlib
import json
import random

import numpy as np
import pytest
import torch

from maskconnect.data.decode import decode, resize
from maskconnect.data.mini import build_mini, read_mini
from maskconnect.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image")

PARTS = {"train": ("ant", "bee"), "val": ("cow",), "test": ("dog",)}
SMALL = {"classes": 2, "per_class": 5, "train_per_class": 3, "size": 8}


def write(path, size=(6, 5), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_tables(root, folder, per_class=12):
    """Three tables of disjoint classes; a class's rows are in no order of their names."""
    for part, labels in PARTS.items():
        names = [(f"{label}{number:02d}.jpg", label) for label in labels for number in range(per_class)]
        random.Random(1).shuffle(names)
        (root / f"{part}.csv").write_text("filename,label\n" + "".join(f"{name},{label}\n" for name, label in names))
        for name, _ in names:
            write(folder / name)


@pytest.fixture
def tables(tmp_path):
    write_tables(tmp_path, tmp_path / "images")
    return tmp_path


@pytest.fixture
def imagenet(tmp_path):
    """Four classes of eight images of several sizes; there is no val/."""
    root = tmp_path / "imagenet"
    for label in ("n01", "n02", "n03", "n04"):
        for number in range(8):
            write(root / "train" / label / f"{number}.JPEG", size=(10 + number, 15), seed=number)
    return root


def checksums(root):
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def drawn(root):
    """The sources of a set of one class, in the order in which they were drawn."""
    files = json.loads((root / "manifest.json").read_text())["files"]
    return [files[name] for name in sorted(files, key=lambda name: name.split("/")[-1])]


def test_the_classes_of_all_tables_are_pooled_and_each_is_split_five_to_one(tables):
    splits = read_mini(tables)
    assert splits.train.classes == splits.test.classes == ("ant", "bee", "cow", "dog")
    assert torch.bincount(splits.train.labels).tolist() == [10, 10, 10, 10]
    assert torch.bincount(splits.test.labels).tolist() == [2, 2, 2, 2]
    assert not set(splits.train.names) & set(splits.test.names)
    for files in (splits.train, splits.test):
        assert all(files.classes[label] in name for name, label in zip(files.names, files.labels, strict=True))
        assert all(decode(files.root / name).shape == (6, 5, 3) for name in files.names)


def test_the_split_is_the_documented_one_by_the_order_of_the_rows(tables):
    rows = (tables / "val.csv").read_text().split()[1:]
    names = ["images/" + row.split(",")[0] for row in rows]
    random.Random(0).shuffle(names)
    splits = read_mini(tables)
    assert sorted(names[:10]) == [name for name in splits.train.names if "cow" in name]
    assert sorted(names[10:]) == [name for name in splits.test.names if "cow" in name]


def test_the_shuffle_that_the_split_rests_on_is_the_same_in_every_python():
    numbers = list(range(600))
    random.Random(0).shuffle(numbers)
    assert numbers[-6:] == [497, 523, 265, 41, 430, 394]


def test_images_may_lie_beside_the_tables(tmp_path):
    write_tables(tmp_path, tmp_path)
    assert all("/" not in name for name in read_mini(tmp_path).train.names)


def test_a_table_may_have_further_columns_and_a_byte_order_mark(tables):
    rows = (tables / "val.csv").read_text().split()
    (tables / "val.csv").write_text("\n".join(f"{row},more" for row in rows), encoding="utf-8-sig")
    assert len(read_mini(tables).train) == 40


def test_a_tree_of_class_folders_is_read_as_one(tmp_path):
    for part in ("train", "test"):
        write(tmp_path / part / "ant" / f"{part}.png")
    splits = read_mini(tmp_path)
    assert (splits.train.names, splits.test.names) == (("train/ant/train.png",), ("test/ant/test.png",))


def test_neither_form_is_an_error_that_says_both(tmp_path):
    with pytest.raises(DataError, match=r"neither a folder train/ nor a train\.csv; .*build_mini"):
        read_mini(tmp_path)


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_missing_table_is_an_error_that_names_it(tables, part):
    (tables / f"{part}.csv").unlink()
    with pytest.raises(DataError, match=rf"{part}\.csv is missing; "):
        read_mini(tables)


@pytest.mark.parametrize("header", ["file,label", "filename;label", ""])
def test_a_table_without_the_columns_is_an_error_that_shows_its_first_line(tables, header):
    rows = (tables / "val.csv").read_text().split("\n")
    (tables / "val.csv").write_text("\n".join([header, *rows[1:]]) if header else "")
    with pytest.raises(DataError, match=rf"the first line of .*val\.csv is '{header}'; .*filename,label"):
        read_mini(tables)


def append(table, text):
    table.write_text(table.read_text() + text)


@pytest.mark.parametrize("name", ["gone.jpg", "/etc/hostname", "../train.csv/no"])
def test_a_table_that_names_a_file_that_is_not_there_is_an_error(tables, name):
    append(tables / "test.csv", f"{name},dog\n")
    with pytest.raises(DataError, match=rf"test\.csv names {name}, which is not in .*images"):
        read_mini(tables)


@pytest.mark.parametrize("label", ["ant", "dog"])
def test_a_file_that_is_labeled_twice_is_an_error(tables, label):
    append(tables / "test.csv", f"ant03.jpg,{label}\n")
    with pytest.raises(DataError, match=rf"ant03\.jpg is labeled twice, 'ant' and '{label}' \(in .*test\.csv\)"):
        read_mini(tables)


@pytest.mark.parametrize("row", ["ant03.jpg", "ant03.jpg,", ",ant"])
def test_a_row_without_a_file_or_a_label_is_an_error_that_says_where(tables, row):
    append(tables / "test.csv", f"{row}\n")
    with pytest.raises(DataError, match=r"line 14 of .*test\.csv has no filename or no label"):
        read_mini(tables)


def test_a_table_of_no_rows_is_an_error(tables):
    (tables / "val.csv").write_text("filename,label\n")
    with pytest.raises(DataError, match=r"val\.csv has no rows"):
        read_mini(tables)


def test_a_class_of_one_image_is_an_error_for_it_cannot_be_split(tables):
    write(tables / "images" / "elk.jpg")
    append(tables / "test.csv", "elk.jpg,elk\n")
    with pytest.raises(DataError, match="class 'elk' has 1 image in "):
        read_mini(tables)


def test_a_damaged_image_is_left_out_if_asked_and_moves_no_other(tables):
    whole = read_mini(tables)
    bad = whole.train.names[3]
    (tables / bad).write_bytes((tables / bad).read_bytes()[:-100])
    assert read_mini(tables).train.names == whole.train.names
    with pytest.warns(UserWarning, match="are skipped: images/"):
        found = read_mini(tables, skip_unreadable=True)
    assert found.train.names == tuple(name for name in whole.train.names if name != bad)
    assert found.test.names == whole.test.names


def test_a_set_is_drawn_from_imagenet_and_read_again(imagenet, tmp_path):
    seen = []
    dest = build_mini(imagenet, tmp_path / "sets" / "mini", **SMALL, progress=lambda *step: seen.append(step))
    assert dest == tmp_path / "sets" / "mini"
    assert seen == [(number, 10) for number in range(1, 11)]
    splits = read_mini(dest)
    assert len(splits.train.classes) == 2
    assert (len(splits.train), len(splits.test)) == (6, 4)
    manifest = json.loads((dest / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("seed", *SMALL)} == {"seed": 0, **SMALL}
    assert manifest["unreadable"] == []
    assert sorted(manifest["files"]) == sorted(splits.train.names + splits.test.names)
    assert len(set(manifest["files"].values())) == 10
    for name, source in manifest["files"].items():
        assert name.split("/")[1] == source.split("/")[1]
        np.testing.assert_array_equal(decode(dest / name), resize(decode(imagenet / source), 8, 8))


def test_the_same_seed_makes_the_same_set_to_the_byte_and_another_seed_another(imagenet, tmp_path):
    one, two, other = (
        checksums(build_mini(imagenet, tmp_path / name, seed=seed, **SMALL))
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    assert len(one) == 11
    assert one == two
    assert one != other


def test_a_manifest_makes_its_set_again_to_the_byte(imagenet, tmp_path):
    (imagenet / "train" / "n02" / "0.JPEG").write_bytes(b"damaged")
    first = build_mini(imagenet, tmp_path / "first", seed=5, **{**SMALL, "classes": 4})
    write(imagenet / "train" / "n00" / "new.JPEG")  # which a draw, but no manifest, would take into account
    again = build_mini(imagenet, tmp_path / "again", manifest=first / "manifest.json")
    assert checksums(first) == checksums(again)


def test_damaged_images_are_replaced_by_the_next_and_noted(imagenet, tmp_path):
    options = {**SMALL, "classes": 1}
    sources = drawn(build_mini(imagenet, tmp_path / "whole", **options))
    assert sources != sorted(sources)  # drawn, and not the first that there are
    bad = sources[1]
    (imagenet / bad).write_bytes((imagenet / bad).read_bytes()[:-100])
    less = build_mini(imagenet, tmp_path / "less", **options)
    assert json.loads((less / "manifest.json").read_text())["unreadable"] == [bad]
    assert drawn(less)[:4] == [source for source in sources if source != bad]
    assert drawn(less)[4] not in sources


def test_a_class_of_too_few_images_is_an_error_that_names_it_and_leaves_nothing(imagenet, tmp_path):
    with pytest.raises(DataError, match=r"class 'n0\d' has 8 readable images in .*, fewer than the 9 to draw"):
        build_mini(imagenet, tmp_path / "mini", **{**SMALL, "per_class": 9})
    assert [path.name for path in tmp_path.iterdir()] == ["imagenet"]


def test_too_few_classes_are_an_error(imagenet, tmp_path):
    with pytest.raises(DataError, match="has 4 classes, fewer than the 5 to draw"):
        build_mini(imagenet, tmp_path / "mini", **{**SMALL, "classes": 5})


def test_a_folder_that_is_not_imagenet_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere has no folder train/"):
        build_mini(tmp_path / "nowhere", tmp_path / "mini")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_nothing(imagenet, tmp_path, kind):
    def interrupt(done, total):
        assert not (tmp_path / "mini").exists()
        if done == 7:
            raise kind

    with pytest.raises(kind):
        build_mini(imagenet, tmp_path / "mini", **SMALL, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["imagenet"]


def test_a_destination_that_holds_something_is_refused_and_an_empty_one_is_taken(imagenet, tmp_path):
    dest = tmp_path / "mini"
    dest.mkdir()
    (dest / "mine.txt").write_text("keep me")
    with pytest.raises(DataError, match="mini exists and is not an empty folder"):
        build_mini(imagenet, dest, **SMALL)
    assert (dest / "mine.txt").read_text() == "keep me"
    (dest / "mine.txt").unlink()
    assert len(read_mini(build_mini(imagenet, dest, **SMALL)).train) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes is 0; it must be 1 or more"),
        ({"size": -1}, "size is -1; it must be 1 or more"),
        ({"train_per_class": 0}, "train_per_class is 0; it must be 1 or more"),
        ({"train_per_class": 5}, "per_class is 5; it must be more than train_per_class, 5"),
        ({"seed": 0.5}, "seed is 0.5; it must be an integer"),
    ],
)
def test_numbers_that_cannot_be_meant_are_errors_before_anything_is_written(imagenet, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        build_mini(imagenet, tmp_path / "sets" / "mini", **{**SMALL, **options})
    assert not (tmp_path / "sets").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {}}', '{"files": 3}'])
def test_a_file_that_is_not_a_manifest_is_an_error_that_names_it(imagenet, tmp_path, text):
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(DataError, match=r"it\.json is not a (readable )?manifest"):
        build_mini(imagenet, tmp_path / "mini", manifest=tmp_path / "it.json")


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("train/../../evil.png", "train/n01/0.JPEG"),
        ("/train/n01/0.png", "train/n01/0.JPEG"),
        ("other/n01/0.png", "train/n01/0.JPEG"),
        ("train/n01/0.png", "/etc/passwd"),
        ("train/n01/0.png", "train/n01/../../../secret.png"),
        ("train/n01/0.png", 3),
    ],
)
def test_a_manifest_that_leads_outside_is_refused(imagenet, tmp_path, target, source):
    plan = {"seed": 0, **SMALL, "files": {target: source}, "unreadable": []}
    (tmp_path / "it.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match=r"it\.json has .* both must be in train/ or test/"):
        build_mini(imagenet, tmp_path / "mini", manifest=tmp_path / "it.json")


def test_a_manifest_whose_image_is_gone_is_an_error_that_names_it(imagenet, tmp_path):
    first = build_mini(imagenet, tmp_path / "first", **SMALL)
    gone = next(iter(json.loads((first / "manifest.json").read_text())["files"].values()))
    (imagenet / gone).unlink()
    with pytest.raises(DataError, match=f"{gone} cannot be read"):
        build_mini(imagenet, tmp_path / "again", manifest=first / "manifest.json")
    assert not (tmp_path / "again").exists()


def test_the_numbers_of_the_paper_are_the_defaults():
    defaults = build_mini.__kwdefaults__
    assert [defaults[name] for name in ("classes", "per_class", "train_per_class", "size")] == [100, 600, 500, 84]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files":' * 400 + "1" + "}" * 400, '{"seed": 1e999}'])
def test_a_manifest_that_is_nested_deeply_or_not_finite_is_an_error(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="is not a readable manifest"):
        build_mini(tmp_path, tmp_path / "out", manifest=tmp_path / "manifest.json")
