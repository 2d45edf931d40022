"""Sets that are folders of images, a folder a class: ImageNet's form, and most people's own."""

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
"""Called with how many images are done, and of how many."""

SUFFIXES = (".jpeg", ".jpg", ".png")
TEST_FOLDERS = ("val", "validation", "test")
"""Where the test images are; the first that exists, unless test/ has class folders too. ImageNet's test/ has none."""

MANY = 10_000
"""From how many images on it pays to start worker processes, which takes seconds."""


def read_folder(root: Path, *, skip_unreadable: bool = False) -> Splits:
    """The images in `train/<class>/` and in `val/<class>/` (or `validation/`, or `test/`) below a folder.

    With both `val/<class>/` and `test/<class>/`, the first is for validation and the second for testing.

    The classes are the sorted names of the folders in `train/`. Images may lie at any depth below their class; what is
    hidden, is in no class folder, or is neither .jpeg, .jpg nor .png is passed over. No image is decoded, so that a
    damaged one is an error only when it is used, unless `skip_unreadable` is set: that decodes all of them once, and
    leaves the damaged ones out.
    """
    root = Path(root)
    folders = [root / "train", *_other_folders(root)]
    classes = _common_classes(folders)
    parts = [files_of(root, {name: image_names(root, folder / name) for name in classes}) for folder in folders]
    splits = Splits(train=parts[0], validation=parts[1] if len(parts) == 3 else None, test=parts[-1])
    return readable_only(splits) if skip_unreadable else splits


def unreadable(files: Files, *, progress: Progress | None = None) -> list[str]:
    """The names of the files that cannot be decoded, in order.

    Many files are decoded in worker processes; a script that calls this does so under `if __name__ == "__main__":`.
    """
    paths = [files.root / name for name in files.names]
    workers = os.cpu_count() or 1
    if len(paths) < MANY or workers == 1:
        return _bad(files.names, map(_is_bad, paths), progress)
    # Not forked: a fork of a process that runs torch's threads may hang.
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
                f"the processes that check the {len(paths)} images in {files.root} have died; call this under "
                '`if __name__ == "__main__":` if it is in a script, and look for a lack of memory otherwise.'
            ) from None


def readable_only(splits: Splits) -> Splits:
    """The splits without the files that cannot be decoded; it is an error if that leaves a class empty."""
    train, validation, test = (
        _readable_files(part) if isinstance(part, Files) else None
        for part in (splits.train, splits.validation, splits.test)
    )
    assert train is not None
    assert test is not None
    return Splits(train=train, validation=validation, test=test)


def class_names(folder: Path) -> list[str]:
    """The sorted names of the class folders in a folder, of which there must be some."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names and any(_is_image(path.name) for path in folder.iterdir()):
        what = "the validation images" if folder.name in TEST_FOLDERS else "the images"
        raise DataError(
            f"{folder} holds images but no class folders; {what} must be sorted into a folder a class, with the "
            "names that the folders in train/ have."
        )
    if not names:
        raise DataError(f"{folder} has no class folders; put a folder of JPEG or PNG images a class into it.")
    return names


def image_names(root: Path, folder: Path) -> list[str]:
    """The sorted names, relative to `root`, of the images at any depth in a class's folder; there must be some."""
    names: list[str] = []
    seen: set[Path] = set()
    for place, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        here = Path(place)
        if here.resolve() in seen:  # a link back to a folder above would list its images again and again
            folders.clear()
            continue
        seen.add(here.resolve())
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = here.relative_to(root).as_posix()
        names += [f"{below}/{name}" for name in files if _is_image(name)]
    if not names:
        raise DataError(f"class {folder.name!r} has no images in {folder}; put JPEG or PNG files there, or remove it.")
    return sorted(names)


def files_of(root: Path, names_of_class: Mapping[str, Iterable[str]]) -> Files:
    """A set of the files of each class; labels number the classes as they come."""
    labelled = [(name, label) for label, names in enumerate(names_of_class.values()) for name in names]
    labels = torch.tensor([label for _, label in labelled], dtype=torch.int64)
    return Files(root, tuple(name for name, _ in labelled), labels, tuple(names_of_class))


def _check_folder(root: Path) -> None:
    """`root` must be a folder that exists."""
    if not root.is_dir():
        found = "is not a folder" if root.exists() else "does not exist"
        raise DataError(
            f"{root} {found}; a folder was looked for with train/ and val/, and in each a folder of JPEG or PNG images "
            "a class, so unpack the images there (ImageNet's come from https://image-net.org/download), or pass the "
            "folder that they are in."
        )


def _other_folders(root: Path) -> list[Path]:
    """The folder of the test images; of validation and test images if there are both, sorted into classes."""
    _check_folder(root)
    if not (root / "train").is_dir():
        raise DataError(f"{root} has no folder train/; put the training images there, a folder a class.")
    found = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if not found:
        raise DataError(
            f"{root} has no folder val/, validation/ or test/; put the validation images into one of them, a "
            "folder a class."
        )
    sorted_test = found[-1].name == "test" and any(path.is_dir() for path in found[-1].iterdir())
    return [found[0], found[-1]] if len(found) > 1 and sorted_test else found[:1]


def _common_classes(folders: Sequence[Path]) -> list[str]:
    """The classes, which must be the same in all folders."""
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
    """The files without the damaged ones."""
    bad = set(unreadable(files))
    if bad:
        shown = ", ".join(sorted(bad)[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        warnings.warn(f"{len(bad)} files in {files.root} cannot be read and are left out: {shown}", stacklevel=2)
    kept = files.subset(torch.tensor([i for i, name in enumerate(files.names) if name not in bad], dtype=torch.int64))
    counts = torch.bincount(kept.labels, minlength=len(kept.classes))
    if not counts.all():
        label = int((counts == 0).nonzero()[0])
        first = files.names[files.labels.tolist().index(label)]
        raise DataError(
            f"class {files.classes[label]!r} has no readable image ({files.root / first} is damaged, and so are any "
            "others of it); get its images anew."
        )
    return kept


def _bad(names: Sequence[str], verdicts: Iterable[bool], progress: Progress | None) -> list[str]:
    """The names whose verdict is that they are bad."""
    found = []
    for done, (name, bad) in enumerate(zip(names, verdicts, strict=True), start=1):
        if bad:
            found.append(name)
        if progress is not None:
            progress(done, len(names))
    return found


def _is_bad(path: Path) -> bool:
    """Whether a file cannot be decoded; nothing less than decoding it tells."""
    try:
        decode(path)
    except DataError:
        return True
    return False


@contextlib.contextmanager
def _workers_ignore_ctrl_c() -> Iterator[None]:
    """Let processes that are started meanwhile ignore Ctrl-C: it goes to all, and this one tells the others to end."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _refuse(error: OSError) -> None:
    """Say that a folder cannot be listed, over which `os.walk` would pass in silence."""
    raise DataError(f"{error.filename} cannot be listed ({error.strerror}); make it readable, or remove it.") from None


def _is_image(name: str) -> bool:
    """Whether a file's name is that of an image, and not hidden."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
