"""Read sets that have one folder of images per class, as ImageNet does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from maskconnect.data.decode import decode
from maskconnect.data.sets import Files, Splits
from maskconnect.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the number of images done, and with the number of all images."""

SUFFIXES = (".jpeg", ".jpg", ".png")
TEST_FOLDERS = ("val", "validation", "test")
"""Folders of test images: the first that exists, unless test/ has class folders too. ImageNet's test/ has none."""

MANY = 10_000
"""The number of images from which worker processes are worth their start-up time of seconds."""


def read_folder(root: Path, *, skip_unreadable: bool = False) -> Splits:
    """Read the images in `train/<class>/` and in `val/<class>/` (or `validation/`, or `test/`) below a folder.

    If both `val/<class>/` and `test/<class>/` exist, the first is for validation and the second for testing.

    The classes are the sorted names of the folders in `train/`. Images may be at any depth below their class; hidden
    files, files outside of class folders, and files other than .jpeg, .jpg and .png are ignored. Images are not
    decoded, so a damaged one is an error only when it is used. With `skip_unreadable`, all images are decoded once, and
    damaged ones are skipped.
    """
    root = Path(root)
    folders = [root / "train", *_other_folders(root)]
    classes = _common_classes(folders)
    parts = [files_of(root, {name: image_names(root, folder / name) for name in classes}) for folder in folders]
    splits = Splits(train=parts[0], validation=parts[1] if len(parts) == 3 else None, test=parts[-1])
    return readable_only(splits) if skip_unreadable else splits


def unreadable(files: Files, *, progress: Progress | None = None) -> list[str]:
    """Return the names of the files that cannot be decoded, in order.

    Many files are decoded in worker processes, so a script must call this under `if __name__ == "__main__":`.
    """
    paths = [files.root / name for name in files.names]
    workers = os.cpu_count() or 1
    if len(paths) < MANY or workers == 1:
        return _bad(files.names, map(_is_bad, paths), progress)
    # Not fork: a forked process with torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            with _workers_ignore_ctrl_c():
                verdicts = pool.map(_is_bad, paths, chunksize=32)
            return _bad(files.names, verdicts, progress)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BrokenProcessPool:
            raise DataError(
                f"the processes that check the {len(paths)} images in {files.root} died; in a script, call this under "
                '`if __name__ == "__main__":`, otherwise check that there is enough memory.'
            ) from None


def readable_only(splits: Splits) -> Splits:
    """Return the splits without files that cannot be decoded; an error if a class becomes empty."""
    train, validation, test = (
        _readable_files(part) if isinstance(part, Files) else None
        for part in (splits.train, splits.validation, splits.test)
    )
    assert train is not None
    assert test is not None
    return Splits(train=train, validation=validation, test=test)


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in a folder; an error if there are none."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names and any(_is_image(path.name) for path in folder.iterdir()):
        what = "the validation images" if folder.name in TEST_FOLDERS else "the images"
        raise DataError(
            f"{folder} holds images but no class folders; sort {what} into one folder per class, with the same names "
            "as in train/."
        )
    if not names:
        raise DataError(f"{folder} has no class folders; put one folder of JPEG or PNG images per class into it.")
    return names


def image_names(root: Path, folder: Path) -> list[str]:
    """Return the sorted names, relative to `root`, of all images below a class folder; an error if there are none."""
    names: list[str] = []
    seen: set[Path] = set()
    for place, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        here = Path(place)
        if here.resolve() in seen:  # a link to a parent folder would list its images forever
            folders.clear()
            continue
        seen.add(here.resolve())
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = here.relative_to(root).as_posix()
        names += [f"{below}/{name}" for name in files if _is_image(name)]
    if not names:
        raise DataError(
            f"class {folder.name!r} has no images in {folder}; put JPEG or PNG files there, or remove the folder."
        )
    return sorted(names)


def files_of(root: Path, names_of_class: Mapping[str, Iterable[str]]) -> Files:
    """Return a set of the files of each class; labels number the classes in order."""
    labeled = [(name, label) for label, names in enumerate(names_of_class.values()) for name in names]
    labels = torch.tensor([label for _, label in labeled], dtype=torch.int64)
    return Files(root, tuple(name for name, _ in labeled), labels, tuple(names_of_class))


def _check_folder(root: Path) -> None:
    """Raise an error if `root` is not a folder."""
    if not root.is_dir():
        found = "is not a folder" if root.exists() else "does not exist"
        raise DataError(
            f"{root} {found}; it must be a folder with train/ and val/, each with one folder of JPEG or PNG images per "
            "class. Unpack the images there (ImageNet is at https://image-net.org/download), or pass another folder."
        )


def _other_folders(root: Path) -> list[Path]:
    """Return the folder of test images, or those of validation and test images if both have class folders."""
    _check_folder(root)
    if not (root / "train").is_dir():
        raise DataError(f"{root} has no folder train/; put the training images there, in one folder per class.")
    found = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if not found:
        raise DataError(
            f"{root} has no folder val/, validation/ or test/; put the test images into one of them, in "
            "one folder per class."
        )
    sorted_test = found[-1].name == "test" and any(path.is_dir() for path in found[-1].iterdir())
    return [found[0], found[-1]] if len(found) > 1 and sorted_test else found[:1]


def _common_classes(folders: Sequence[Path]) -> list[str]:
    """Return the classes; an error if the folders have different ones."""
    classes = {folder: class_names(folder) for folder in folders}
    train = folders[0]
    for here, there in [pair for other in folders[1:] for pair in ((other, train), (train, other))]:
        extra = sorted(set(classes[here]) - set(classes[there]))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise DataError(
                f"class {extra[0]!r}{more} is in {here} but not in {there}; both need the same class folders, so add "
                "its images there or remove them here."
            )
    return classes[train]


def _readable_files(files: Files) -> Files:
    """Return the files without damaged ones."""
    bad = set(unreadable(files))
    if bad:
        shown = ", ".join(sorted(bad)[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        warnings.warn(f"{len(bad)} files in {files.root} cannot be read and are skipped: {shown}", stacklevel=2)
    kept = files.subset(torch.tensor([i for i, name in enumerate(files.names) if name not in bad], dtype=torch.int64))
    counts = torch.bincount(kept.labels, minlength=len(kept.classes))
    if not counts.all():
        label = int((counts == 0).nonzero()[0])
        first = files.names[files.labels.tolist().index(label)]
        raise DataError(
            f"class {files.classes[label]!r} has no readable image; {files.root / first} and any others of it are "
            "damaged. Replace them."
        )
    return kept


def _bad(names: Sequence[str], verdicts: Iterable[bool], progress: Progress | None) -> list[str]:
    """Return the names of bad files."""
    found = []
    for done, (name, bad) in enumerate(zip(names, verdicts, strict=True), start=1):
        if bad:
            found.append(name)
        if progress is not None:
            progress(done, len(names))
    return found


def _is_bad(path: Path) -> bool:
    """Return whether a file cannot be decoded, by decoding it."""
    try:
        decode(path)
    except DataError:
        return True
    return False


@contextlib.contextmanager
def _workers_ignore_ctrl_c() -> Iterator[None]:
    """Make processes that are started in this context ignore Ctrl-C; this process ends them."""
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set there
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _refuse(error: OSError) -> None:
    """Raise an error for a folder that cannot be listed, which `os.walk` would skip silently."""
    raise DataError(f"{error.filename} cannot be listed ({error.strerror}); make it readable, or remove it.") from None


def _is_image(name: str) -> bool:
    """Return whether a name is that of an image that is not hidden."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
