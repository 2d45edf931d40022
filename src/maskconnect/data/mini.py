"""Read or build Mini-ImageNet: 100 classes of ImageNet with 500 training and 100 test images each, 84 x 84.

The set is distributed for few-shot learning, with different classes in training and test. For classification, all
classes are pooled, and the images of each class are split.
"""

from __future__ import annotations

import csv
import json
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from maskconnect.data.decode import decode, resize
from maskconnect.data.folder import Progress, class_names, files_of, image_names, read_folder, readable_only
from maskconnect.data.sets import Splits
from maskconnect.errors import ConfigError, DataError, cut, integer, need, shown
from maskconnect.limits import within
from maskconnect.reading import read_json

PARTS = ("train", "val", "test")
INSIDE = re.compile(r"(train|test)/[^/\\]+/[^\\]+")


def read_mini(root: Path, *, skip_unreadable: bool = False) -> Splits:
    """Read Mini-ImageNet from a folder, in one of two forms.

    (a) `train/<class>/` and `test/<class>/`, as `build_mini` writes it and `read_folder` reads it.
    (b) train.csv, val.csv and test.csv with columns `filename,label`, the images in `images/` or in the same
        folder. All classes are pooled; the n images of each, in the order of the rows, are shuffled by
        `random.Random(0)`; the first n * 5 // 6 are for training (500 of 600), the others for testing.
    """
    root = Path(root)
    if (root / "train").is_dir():
        return read_folder(root, skip_unreadable=skip_unreadable)
    if not any((root / f"{part}.csv").is_file() for part in PARTS):
        raise DataError(
            f"{root} has neither a folder train/ nor a train.csv; pass a folder of class folders in train/ and test/, "
            "or one with train.csv, val.csv, test.csv and images/, or build the set from ImageNet with build_mini."
        )
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for label, names in sorted(_pooled(root).items()):
        count = len(names) * 5 // 6
        if count == 0:
            raise DataError(
                f"class {shown(label)} has 1 image in {root}; it needs 1 for training and 1 for testing. Add another."
            )
        random.Random(0).shuffle(names)
        train[label], test[label] = sorted(names[:count]), sorted(names[count:])
    splits = Splits(train=files_of(root, train), test=files_of(root, test))
    return readable_only(splits) if skip_unreadable else splits


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parameters and files of a set, from which it can be rebuilt with the same ImageNet."""

    seed: int
    classes: int
    per_class: int
    train_per_class: int
    size: int
    files: dict[str, str]  # the source of each image, relative to the root of ImageNet
    unreadable: list[str]  # drawn images that are damaged; the next ones replaced them

    def __post_init__(self) -> None:
        for name in ("classes", "train_per_class", "size"):
            within(name, getattr(self, name))
        if integer("per_class", self.per_class) <= self.train_per_class:
            raise ConfigError(
                f"per_class is {self.per_class}; it must be more than train_per_class, {self.train_per_class}, "
                "because the others are the test images."
            )
        integer("seed", self.seed)


def build_mini(
    imagenet_root: Path,
    dest: Path,
    *,
    seed: int = 0,
    classes: int = 100,
    per_class: int = 600,
    train_per_class: int = 500,
    size: int = 84,
    manifest: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Draw a set from ImageNet's `train/`, and write it to `dest`; the same arguments give the same set.

    Whole images are resized to `size` x `size` and written without loss, as `train/<class>/` and `test/<class>/`;
    `manifest.json` lists the source of each image. `dest` appears only when the set is complete.

    Args:
        imagenet_root: the folder that holds `train/<class>/`.
        dest: a folder that does not exist or is empty.
        manifest: the manifest.json of a set, to rebuild the same set; it replaces the five numbers.
        progress: called with the number of images written, and with the number of all images.
    """
    imagenet_root, dest = Path(imagenet_root), Path(dest)
    if manifest is None:
        numbers = {"seed": seed, "classes": classes, "per_class": per_class}
        numbers |= {"train_per_class": train_per_class, "size": size}
        plan = Manifest(**{name: integer(name, number) for name, number in numbers.items()}, files={}, unreadable=[])
    else:
        plan = _read_manifest(Path(manifest))
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise DataError(f"{dest} exists and is not an empty folder; pass another folder, or remove it.")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        made = Path(scratch) / "set"
        total = len(plan.files) or plan.classes * plan.per_class
        steps = _copy_listed(imagenet_root, made, plan) if plan.files else _draw(imagenet_root, made, plan)
        files: dict[str, str] = {}
        unreadable = list(plan.unreadable)
        for target, source in steps:
            if target is None:
                unreadable.append(source)
                continue
            files[target] = source
            if progress is not None:
                progress(len(files), total)
        text = json.dumps(asdict(replace(plan, files=files, unreadable=unreadable)), indent=1, sort_keys=True)
        (made / "manifest.json").write_text(text + "\n", encoding="utf-8", newline="\n")
        if dest.exists():
            dest.rmdir()  # Windows does not rename over a folder
        made.rename(dest)
    return dest


def _pooled(root: Path) -> dict[str, list[str]]:
    """Return the names of the images of each class in the three tables, relative to the root."""
    folder = root / "images" if (root / "images").is_dir() else root
    pooled: dict[str, list[str]] = {}
    seen: dict[str, str] = {}
    for table, filename, label in _rows(root):
        path = folder / filename
        if ".." in path.parts or not path.is_relative_to(root) or not path.is_file():
            raise DataError(
                f"{table} names {cut(filename)}, which is not in {folder}; put it there, or remove its row."
            )
        name = path.relative_to(root).as_posix()
        if name in seen:
            raise DataError(
                f"{cut(filename)} is labeled twice, {shown(seen[name])} and {shown(label)} (in {table}); keep one "
                "of the rows."
            )
        seen[name] = label
        pooled.setdefault(label, []).append(name)
    return pooled


def _rows(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the table, the file and the label of every row in the three tables."""
    for part in PARTS:
        table = root / f"{part}.csv"
        if not table.is_file():
            raise DataError(
                f"{table} is missing; train.csv, val.csv and test.csv are needed, because each lists different classes."
            )
        with table.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            if not {"filename", "label"} <= set(reader.fieldnames or ()):
                found = shown(",".join(reader.fieldnames or ()))
                raise DataError(f"the first line of {table} is {found}; it must name the columns filename,label.")
            empty = True
            for row in _rows_of(reader, table):
                if not row["filename"] or not row["label"]:
                    raise DataError(f"line {reader.line_num} of {table} has no filename or no label; it needs both.")
                empty = False
                yield table, row["filename"], row["label"]
        if empty:
            raise DataError(f"{table} has no rows; each of the three tables must list the images of its classes.")


def _rows_of(reader: csv.DictReader[str], table: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table; an error for an invalid one."""
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {table} is not a valid row ({error}); fix it.") from None


def _draw(imagenet_root: Path, made: Path, plan: Manifest) -> Iterator[tuple[str | None, str]]:
    """Write images drawn at random; yield the target and the source of each, or None and a damaged source."""
    train = imagenet_root / "train"
    if not train.is_dir():
        raise DataError(f"{imagenet_root} has no folder train/; pass the folder that holds ImageNet's train/.")
    known = class_names(train)
    if len(known) < plan.classes:
        raise DataError(
            f"{train} has {len(known)} classes, fewer than the {plan.classes} to draw; set classes to fewer."
        )
    chance = random.Random(plan.seed)
    for name in sorted(chance.sample(known, plan.classes)):
        sources = image_names(imagenet_root, train / name)
        chance.shuffle(sources)
        count = 0
        for source in sources:
            if count == plan.per_class:
                break
            part = "train" if count < plan.train_per_class else "test"
            target = f"{part}/{name}/{count:05d}.png"
            try:
                _copy(imagenet_root / source, made / target, plan.size)
            except DataError:
                yield None, source
                continue
            count += 1
            yield target, source
        if count < plan.per_class:
            raise DataError(
                f"class {name!r} has {count} readable images in {train}, fewer than the {plan.per_class} to draw; set "
                "per_class to fewer, or use another seed."
            )


def _copy_listed(imagenet_root: Path, made: Path, plan: Manifest) -> Iterator[tuple[str | None, str]]:
    """Write the images of a manifest; yield the target and the source of each."""
    for target, source in plan.files.items():
        _copy(imagenet_root / source, made / target, plan.size)
        yield target, source


def _copy(source: Path, target: Path, size: int) -> None:
    """Write one image in its new size."""
    image_HW3 = resize(decode(source), size, size)
    target.parent.mkdir(parents=True, exist_ok=True)
    need("PIL.Image", extra="data").fromarray(image_HW3).save(target, format="PNG")


def _read_manifest(path: Path) -> Manifest:
    """Read a manifest; an error if its names point outside of their folders."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable manifest ({error}); pass the manifest.json of a set.") from None
    names = [field.name for field in fields(Manifest)]
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files or set(found) != set(names):
        raise DataError(
            f"{path} is not a manifest: it must have exactly {', '.join(names)}, and at least 1 image in files. Pass "
            "the manifest.json of a set."
        )
    for target, source in files.items():
        inside = all(INSIDE.fullmatch(str(name)) and ".." not in name.split("/") for name in (target, source))
        if not inside:  # a foreign manifest must not read or write elsewhere
            raise DataError(
                f"{path} has {cut(str(target))} made from {shown(source)}; both must be in train/ or test/. Get "
                "another copy of the manifest."
            )
    return Manifest(**found)
