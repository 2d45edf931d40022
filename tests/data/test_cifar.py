"""CIFAR-10 and CIFAR-100 from stand-ins in the published formats."""

import hashlib
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch

import maskconnect as mc
from maskconnect.data import cifar, load
from maskconnect.data.unpickle import read_plain_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)


def write_python10(folder, count=10):
    folder.mkdir(parents=True)
    for name in cifar.CIFAR10_MD5:
        batch = {b"batch_label": b"x", b"labels": [k % 10 for k in range(count)], b"data": PIXELS[:count]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def write_binary10(folder):
    folder.mkdir(parents=True)
    for name in cifar.CIFAR10_BIN_MD5:
        labels = np.arange(10, dtype=np.uint8)[:, None]
        (folder / name).write_bytes(np.concatenate([labels, PIXELS[:10]], axis=1).tobytes())
    return folder


def write_100(folder, **changes):
    folder.mkdir(parents=True)
    names = {b"fine_label_names": [f"fine{k}".encode() for k in range(12)], b"coarse_label_names": [b"a", b"b", b"c"]}
    batch = {b"fine_labels": list(range(12)), b"coarse_labels": [k % 3 for k in range(12)], b"data": PIXELS} | changes
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def pack(folder, place):
    place.mkdir()
    archive = place / f"{folder.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


def test_the_python_and_the_binary_version_of_cifar10_are_the_same(tmp_path):
    write_python10(tmp_path / "a" / "cifar-10-batches-py")
    write_binary10(tmp_path / "b" / "cifar-10-batches-bin")
    a, b = (load("cifar10", tmp_path / x, verified=False) for x in "ab")
    assert a.train.images.shape == (50, 3, 32, 32)
    assert a.test.classes[3] == "cat"
    for x, y in ((a.train, b.train), (a.test, b.test)):
        assert torch.equal(x.images, y.images)
        assert torch.equal(x.labels, y.labels)
    assert a.test.images[4, 1, 2, 3] == PIXELS[4, 1024 + 2 * 32 + 3]  # green, row 2, column 3


@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, labels):
    write_100(tmp_path / "cifar-100-python")
    splits = load("cifar100", tmp_path, labels=labels, verified=False)
    assert len(splits.train.classes) == (12 if labels == "fine" else 3)
    assert splits.train.labels.tolist() == [k if labels == "fine" else k % 3 for k in range(12)]


def test_a_folder_its_parent_and_the_archive_are_all_accepted(tmp_path):
    folder = write_100(tmp_path / "cifar-100-python")
    archive = pack(folder, tmp_path / "packed")
    wanted = load("cifar100", tmp_path, verified=False).train.images
    for place in (folder, archive, archive.parent, str(archive)):
        assert torch.equal(load("cifar100", place, verified=False).train.images, wanted)


def test_other_checksums_than_the_published_are_an_error_unless_accepted(tmp_path, monkeypatch):
    folder = write_100(tmp_path / "cifar-100-python")
    with pytest.raises(mc.DataError, match=r"meta has the md5 sum .*, not the published 7973b.* --unverified"):
        load("cifar100", tmp_path)
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    monkeypatch.setattr(cifar, "CIFAR100_MD5", sums)
    assert len(load("cifar100", tmp_path).train) == 12


def test_what_is_missing_is_named_with_the_command_that_gets_it(tmp_path):
    with pytest.raises(mc.DataError, match=r"looked for cifar-10-batches-py, .*maskconnect data fetch cifar10"):
        load("cifar10", tmp_path / "nowhere")
    write_python10(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(mc.DataError, match="data_batch_3 is missing"):
        load("cifar10", tmp_path, verified=False)
    (tmp_path / "data.zip").write_bytes(b"")
    with pytest.raises(mc.DataError, match=r"data\.zip must be named"):
        load("cifar10", tmp_path / "data.zip")


def test_a_truncated_archive_is_an_error(tmp_path):
    folder = write_100(tmp_path / "cifar-100-python")
    archive = pack(folder, tmp_path / "cut")
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(mc.DataError, match="is damaged or truncated"):
        load("cifar100", archive.parent, verified=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({b"fine_labels": [99] * 12}, "a label is 99; with 12 classes it must be from 0 to 11"),
        ({b"fine_labels": [-1] * 12}, "a label is -1"),
        ({b"fine_labels": [1] * 11}, "12 images and labels of shape"),
        ({b"fine_labels": [0.5] * 12}, "it must hold one integer per image"),
        ({b"fine_labels": [[1], [1, 2]] * 6}, "rows of different lengths"),
        ({b"data": PIXELS[:, :100]}, "they must be N x 3072 of uint8"),
        ({b"data": PIXELS.astype(np.float32)}, "they must be N x 3072 of uint8"),
    ],
)
def test_labels_and_pixels_that_do_not_fit_are_an_error(tmp_path, changes, said):
    folder = write_100(tmp_path / "cifar-100-python")
    batch = pickle.loads((folder / "train").read_bytes()) | changes
    (folder / "train").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(mc.DataError, match=said):
        load("cifar100", tmp_path, verified=False)


def test_a_file_of_another_kind_is_an_error(tmp_path):
    folder = write_100(tmp_path / "cifar-100-python")
    (folder / "train").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(mc.DataError, match="train has no 'data'"):
        load("cifar100", tmp_path, verified=False)
    folder = write_binary10(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(mc.DataError, match=r"data_batch_2\.bin has 3 bytes, which is not a multiple of 3073"):
        load("cifar10", tmp_path, verified=False)


class Harmful:
    def __init__(self, call, *arguments):
        self.how = call, arguments

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize(
    "value",
    [
        Harmful(os.system, "touch harmed"),
        {b"data": Harmful(eval, "1")},
        [Harmful(getattr, "x", "upper")],
        io.StringIO("x"),
        np.array([Harmful(os.getcwd)], dtype=object),
    ],
)
def test_a_pickle_with_code_in_it_is_refused(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mc.DataError, match="a file is refused: it"):
        read_plain_pickle(pickle.dumps(value, protocol=2), "a file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"abc", pickle.dumps({b"a": 1}, protocol=2)[:-3], b"\x80\x02]q\x00(" * 9]
)
def test_a_damaged_pickle_is_an_error(content):
    with pytest.raises(mc.DataError, match="a file is damaged"):
        read_plain_pickle(content, "a file")


def test_plain_values_are_read():
    value = {b"a": [1, 2.5, "x", b"y", None, True, (3,)], "n": np.arange(4)}
    found = read_plain_pickle(pickle.dumps(value, protocol=2), "a file")
    assert found[b"a"] == value[b"a"]
    assert np.array_equal(found["n"], value["n"])


def packed(value):
    return pickle.dumps(value, protocol=2)[2:-1]


def crafted_kind(word, *state):
    """A call of numpy.dtype, and what BUILD would tell it."""
    call = b"cnumpy\ndtype\n(" + packed(word) + packed(False) + packed(True) + b"tR"
    return call + b"".join([b"(", *state, b"tb"]) if state else call


FIELD = b"}" + packed("a") + b"(" + crafted_kind("O") + packed(1 << 30) + b"ts"
OBJECT_FIELD = [packed(3), packed("|"), b"N", packed(("a",)), FIELD]
HEAD = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + packed((0,)) + packed("b") + b"tR"


def crafted_array(shape, kind):
    return HEAD + b"(" + packed(1) + packed(shape) + kind + packed(False) + b"U\x04abcdtb."


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + crafted_kind("V8", *OBJECT_FIELD, packed(8), packed(1), packed(0x3F)) + b".",
        b"\x80\x02" + crafted_kind("i8", *map(packed, (3, "<", None, None, None, -1, -1, 0x3F))) + b".",
        crafted_array((4,), crafted_kind("O")),
        crafted_array((1 << 40,), crafted_kind("u1")),
        crafted_array((-4,), crafted_kind("u1")),
        b"\x80\x02cnumpy\nndarray\n(" + packed((1 << 30,)) + b"tR.",
        b"\x80\x02c_codecs\nencode\n}" + packed("__name__") + packed("x") + b"sb.",
        b"\x80\x02c_codecs\nencode\n(" + packed("x") + packed("rot13") + b"tR.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
    ],
)
def test_a_crafted_pickle_is_refused_before_numpy_sees_it(content):
    with pytest.raises(mc.DataError, match="a file is refused: it"):
        read_plain_pickle(content, "a file")


def test_arrays_of_every_kind_and_layout_are_read():
    for kind in ("u1", ">i4", "<f8", "?", "i8"):
        for order in "CF":
            value = np.asarray(np.arange(12).reshape(3, 4), dtype=kind, order=order)
            found = read_plain_pickle(pickle.dumps([value], protocol=2), "a file")[0]
            assert np.array_equal(found, value)
            assert found.dtype == value.dtype


def test_arrays_that_python_2_has_written_are_read():
    state = b"U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"  # its strings come as bytes
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03" + state + b"tb"
    content = HEAD + b"(K\x01K\x02K\x02\x86" + kind + b"\x89U\x04abcdtb."
    assert read_plain_pickle(content, "a file").tolist() == [[97, 98], [99, 100]]


def test_lists_that_hold_themselves_or_each_other_many_times_are_read_at_once():
    assert isinstance(read_plain_pickle(b"\x80\x02]q\x00h\x00a.", "a file"), list)
    deep = []
    for _ in range(60):
        deep = [deep, deep]
    assert len(read_plain_pickle(pickle.dumps(deep, protocol=2), "a file")) == 2


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (5, "meta has no list of class names"),
        ([b"x"] * 12, "meta names a class twice"),
        ([1] * 12, "no list of class names"),
    ],
)
def test_invalid_names_of_classes_are_an_error(tmp_path, names, said):
    folder = write_100(tmp_path / "cifar-100-python")
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}, protocol=2))
    with pytest.raises(mc.DataError, match=said):
        load("cifar100", tmp_path, verified=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_of_the_set_that_is_none_is_an_error_and_no_hang(tmp_path, kind):
    place = write_python10(tmp_path / "cifar-10-batches-py") / "data_batch_1"
    place.unlink()
    {"pipe": lambda: os.mkfifo(place), "device": lambda: place.symlink_to("/dev/zero"), "folder": place.mkdir}[kind]()
    with pytest.raises(mc.DataError, match="data_batch_1 of the set cannot be read"):
        load("cifar10", tmp_path, verified=False)
