"""`maskconnect export`: write a trained network for programs that do not have maskconnect."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from maskconnect.ship.saved import Saved


EXPORTS = (".onnx", ".pt2")


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `export` to the command line."""
    about = "export a trained network as ONNX, or as a torch.export program"
    example = "export runs/quick-cifar10-seed0 --onnx cifar10.onnx\n  maskconnect export saved --pt2 network.pt2"
    parser = add_verb(commands, "export", run, about, example)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a finished run, or a saved network")
    output = parser.add_argument_group("output (at least one)")
    output.add_argument("--onnx", type=Path, metavar="FILE", help="write ONNX, for onnxruntime and others")
    output.add_argument("--pt2", type=Path, metavar="FILE", help="write a program for torch.export.load")
    output.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--input", metavar="CxHxW", help="the shape of an image, if the folder does not store it")


def run(args: argparse.Namespace) -> None:
    """Export, and print the size of each file and how far its outputs are from torch's."""
    if args.onnx is None and args.pt2 is None:
        raise ConfigError("no output file is given; add --onnx FILE, --pt2 FILE, or both.")
    from maskconnect.core.lookup import masks_of
    from maskconnect.ship.checked import checked_place
    from maskconnect.ship.export import export_onnx, export_pt2
    from maskconnect.ship.trained import open_folder

    wanted = [(how, path) for how, path in ((export_onnx, args.onnx), (export_pt2, args.pt2)) if path is not None]
    for _, path in wanted:
        checked_place(path, overwrite=args.overwrite)
        if path.exists() and path.resolve().is_relative_to(args.folder.resolve()) and path.suffix not in EXPORTS:
            raise ConfigError(f"{path} is a file of the network to export; choose another name.")
    if len({path.resolve() for _, path in wanted}) < len(wanted):
        raise ConfigError(f"--onnx and --pt2 both name {args.onnx}; give each its own file.")
    saved = open_folder(args.folder)
    example = _example(saved, args.input)
    shape = "x".join(map(str, example.shape[1:]))
    for how, path in wanted:
        difference = how(
            saved.network,
            example,
            path,
            classes=saved.classes,
            preprocessing=saved.preprocessing,
            overwrite=args.overwrite,
        )
        size = path.stat().st_size / 1e6
        print(
            f"{path}   {size:.2f} MB   images Nx{shape}   differs from torch by {difference:.1e} of the largest score"
        )
    if masks_of(saved.network):
        print("the network was frozen, not pruned: unused modules are left out, and batch norms are folded in")


def _example(saved: Saved, given: str | None) -> Tensor:
    """Return two images of the shape that the network reads."""
    import torch

    if given is not None:
        sides = given.split("x")
        if len(sides) != 3 or not all(side.isascii() and side.isdigit() and int(side) for side in sides):
            raise ConfigError(f"--input is {shown(given)}; it must be channels, height and width, such as 3x32x32.")
        return torch.zeros(2, *map(int, sides))
    if saved.preprocessing is None:
        raise ConfigError("the folder does not store the input shape of its network; add it, such as --input 3x32x32.")
    return torch.zeros(2, saved.preprocessing.channels, saved.preprocessing.size, saved.preprocessing.size)
