"""`maskconnect predict`: classify image files with a trained network."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import printable

if TYPE_CHECKING:
    from maskconnect.ship.predict import Prediction


DEVICE = "cpu, cuda, cuda:1, ... (default: a GPU if there is one)"


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `predict` to the command line."""
    about = "print the most likely classes of image files"
    example = "predict runs/quick-cifar10-seed0 cat.jpg dog.png\n  maskconnect predict saved *.jpg --top 1 --json"
    parser = add_verb(commands, "predict", run, about, example)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a finished run, or a saved network")
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+", help="JPEG and PNG files, of any size")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many classes to show (default: 5)")
    parser.add_argument("--device", default="auto", metavar="NAME", help=DEVICE)
    parser.add_argument("--json", action="store_true", help="print one line of JSON per image")


def run(args: argparse.Namespace) -> int:
    """Predict and print, image by image; return 2 if an image could not be read."""
    from maskconnect.ship.predict import predict_files
    from maskconnect.ship.trained import open_folder

    bad = 0
    for found in predict_files(open_folder(args.folder), args.images, top=args.top, device=args.device):
        if found.problem is not None:
            bad += 1
            sys.stdout.flush()  # so that lines stay in order if both streams go to one place
            say(f"error: {found.problem}", file=sys.stderr)
        if args.json:
            print(json.dumps(_plain(found)))
        elif found.problem is None:
            _show(found)
    return 2 if bad else 0


def _plain(found: Prediction) -> dict[str, Any]:
    if found.problem is not None:
        return {"image": str(found.path), "error": found.problem}
    likely = [{"class": each.number, "name": each.name, "probability": each.probability} for each in found.likely]
    return {"image": str(found.path), "predictions": likely}


def _show(found: Prediction) -> None:
    names = [f"class {each.number}" if each.name is None else printable(each.name) for each in found.likely]
    width = max(map(len, names))
    say(str(found.path))
    for name, each in zip(names, found.likely, strict=True):
        print(f"  {name:<{width}}  {100 * each.probability:6.2f} %")
