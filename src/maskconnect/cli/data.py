"""`maskconnect data ...`: list, fetch and check data sets."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.table import show_table
from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from maskconnect.data.sets import Images

Report = dict[str, Any]
WITH_SUMS = ("cifar10", "cifar100")
"""The data sets whose files `load` compares with published checksums."""

MOST_COUNTS = 20
"""The largest number of classes for which the text lists counts per class; JSON always lists them."""

LINE_EVERY = 5.0
"""Seconds between progress lines, if there is no terminal for a progress bar."""


FETCH_EXAMPLES = """data fetch cifar10 data
  maskconnect data fetch fashion-mnist data

A data set that is already in DIR is not downloaded again."""

MINI_EXAMPLES = """data build-mini /data/imagenet mini --seed 1
  maskconnect data build-mini /data/imagenet copy --manifest mini/manifest.json"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `data` and its commands to the command line."""
    about = "list, fetch and check data sets"
    parser = commands.add_parser(
        "data",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  maskconnect data check cifar10 data\n  maskconnect data fetch cifar10 data",
    )
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    add_verb(verbs, "list", list_sets, "list the data sets, and how to get each", "data list")

    examples = "data check digits\n  maskconnect data check cifar100 data --labels coarse"
    verb = add_verb(verbs, "check", check, "load a data set and print what is in it", examples)
    verb.add_argument("name", metavar="NAME", help="a data set; see: maskconnect data list")
    verb.add_argument(
        "root", metavar="DIR", type=Path, nargs="?", help="the folder it is in; digits and mnist5k need none"
    )
    verb.add_argument("--labels", choices=("fine", "coarse"), default="fine", help="labels of cifar100 (default: fine)")
    verb.add_argument("--unverified", action="store_true", help="do not compare files with their published checksums")
    verb.add_argument("--json", action="store_true", help="print JSON")

    verb = add_verb(verbs, "fetch", fetch_set, "download a data set", FETCH_EXAMPLES)
    verb.add_argument("name", metavar="NAME", help="cifar10, cifar100 or fashion-mnist")
    verb.add_argument("dest", metavar="DIR", type=Path, nargs="?", help="the folder to put it in")

    verb = add_verb(verbs, "build-mini", build, "build Mini-ImageNet from ImageNet", MINI_EXAMPLES)
    verb.add_argument("imagenet", metavar="IMAGENET", type=Path, help="the folder that contains ImageNet's train/")
    verb.add_argument("dest", metavar="DIR", type=Path, help="a new folder for the result")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="chooses classes and images (default: 0)")
    verb.add_argument(
        "--manifest", type=Path, metavar="FILE", help="rebuild the data set that this manifest.json describes"
    )


def list_sets(args: argparse.Namespace) -> None:
    """Print the name and content of every data set, and how to get it."""
    from maskconnect.data.catalog import ABOUT
    from maskconnect.data.fetch import SOURCES

    how = {
        "digits": "pip install 'maskconnect[data]'",
        "mnist5k": "pip install 'maskconnect[demo]'",
        "mini-imagenet": "maskconnect data build-mini IMAGENET DIR",
        "imagenet": "register at https://image-net.org/download",
        "folder": "your own",
    }
    how |= {name: f"maskconnect data fetch {name} DIR" for name in SOURCES}
    show_table(("name", "what it is", "how to get it"), [(name, about, how[name]) for name, about in ABOUT.items()])


def check(args: argparse.Namespace) -> None:
    """Load a data set, print what is in it, and fail if one of its files cannot be read."""
    from maskconnect.data.catalog import load
    from maskconnect.data.folder import unreadable
    from maskconnect.data.sets import Files

    splits = load(args.name, args.root, labels=args.labels, verified=not args.unverified)
    summed = args.name in WITH_SUMS and not args.unverified
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    report: Report = {"name": args.name, **{part: _summary(images) for part, images in parts.items() if images}}
    report |= {"checksums": "as published" if summed else "not checked", "unreadable": []}
    for part, images in parts.items():
        if isinstance(images, Files):
            with _progress(f"{part} files") as progress:
                report["unreadable"] += unreadable(images, progress=progress)
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    if report["unreadable"]:
        found, total = len(report["unreadable"]), len(splits.train) + len(splits.test)
        raise DataError(
            f"{found:,} of the {total:,} files in {args.root} cannot be read; download them again, or remove them."
        )


def fetch_set(args: argparse.Namespace) -> None:
    """Download a data set from where it is published."""
    from maskconnect.data.fetch import SOURCES, fetch

    if args.dest is None and args.name in SOURCES:
        raise ConfigError(f"DIR is missing; name the folder to put it in: maskconnect data fetch {args.name} data")
    with _progress(args.name, scale=1e6, unit=" MB") as progress:
        fetch(args.name, args.dest or Path(), progress=progress, say=say)


def build(args: argparse.Namespace) -> None:
    """Build Mini-ImageNet from ImageNet."""
    from maskconnect.data.mini import build_mini

    with _progress("images") as progress:
        source, dest = args.imagenet.expanduser(), args.dest.expanduser()
        made = build_mini(source, dest, seed=args.seed, manifest=args.manifest, progress=progress)
    say(f"mini-imagenet is in {made}; {made / 'manifest.json'} lists the source of every image.")


def _summary(images: Images) -> Report:
    """Count images and classes; name the first of the smallest classes, and of the largest."""
    from maskconnect.data.sets import Arrays

    counts = images.labels.bincount(minlength=len(images.classes)).tolist()
    ends = {
        end: {"class": images.classes[counts.index(count)], "images": count}
        for end, count in (("smallest", min(counts)), ("largest", max(counts)))
    }
    shape = list(images.images.shape[1:]) if isinstance(images, Arrays) else None
    folder = None if isinstance(images, Arrays) else f"{images.names[0].split('/')[0]}/"
    of_class = dict(zip(images.classes, counts, strict=True))
    return {"images": len(images), "classes": len(counts), **ends, "shape": shape, "folder": folder, "counts": of_class}


def _as_text(report: Report) -> str:
    lines = [report["name"]]
    for part in ("train", "validation", "test"):
        found = report.get(part)
        if found is None:
            continue
        low, high = found["smallest"], found["largest"]
        spread = f"{low['images']:,} ({low['class']}) to {high['images']:,} ({high['class']}) per class"
        if low["images"] == high["images"]:
            spread = f"{low['images']:,} per class"
        where = f" in {found['folder']}" if found["folder"] else ""
        lines.append(f"  {part + ':':<11}{found['images']:,} images{where}, {found['classes']:,} classes, {spread}")
        if low["images"] < high["images"] and found["classes"] <= MOST_COUNTS:
            lines.append(" " * 13 + ", ".join(f"{name} {count:,}" for name, count in found["counts"].items()))
    if report["train"]["shape"]:
        lines.append(f"  {'image:':<11}{' x '.join(map(str, report['train']['shape']))}")
    lines.append(f"  {'checksums:':<11}{report['checksums']}")
    lines += [f"  unreadable: {name}" for name in report["unreadable"]]
    return "\n".join(map(printable, lines))  # class names are folder names


@contextlib.contextmanager
def _progress(what: str, *, scale: float = 1, unit: str = "") -> Iterator[Callable[[int, int | None], None]]:
    """Show progress when called with (done, total): a bar on a terminal, otherwise a line every few seconds."""
    if not sys.stderr.isatty():
        yield _lines(what, scale, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    console = Console(stderr=True, markup=False)
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=None, text="")
        yield lambda done, total: bar.update(task, completed=done, total=total, text=_done(done, total, scale, unit))


def _lines(what: str, scale: float, unit: str) -> Callable[[int, int | None], None]:
    last = time.monotonic()

    def show(done: int, total: int | None) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            print(f"{what}: {_done(done, total, scale, unit)}", file=sys.stderr, flush=True)

    return show


def _done(done: int, total: int | None, scale: float, unit: str) -> str:
    whole = f" of {total / scale:,.0f}" if total is not None else ""
    return f"{done / scale:,.0f}{whole}{unit}"
