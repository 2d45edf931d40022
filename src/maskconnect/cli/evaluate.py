"""`maskconnect evaluate`: test a finished run from its saved files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `evaluate` to the command line."""
    about = "compute the test accuracy of a finished run from its saved files"
    examples = "evaluate runs/quick-digits-seed0\n  maskconnect evaluate runs/quick-cifar10-seed0 --data data --json"
    parser = add_verb(commands, "evaluate", run, about, examples)
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the data set (default: data)")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Evaluate, and print."""
    from maskconnect.training.loading import evaluate_run
    from maskconnect.training.options import Options

    if not (args.folder / "recipe.toml").exists() and (args.folder / "maskconnect.json").exists():
        hint = "pass a run folder, or use `maskconnect prune RUN --data DIR`, which tests the network that it writes"
        raise ConfigError(f"{args.folder} is a saved network, which does not name a test set; {hint}.")
    found, images = evaluate_run(args.folder, Options(data=args.data, device=args.device, threads=args.threads))
    if args.json:
        print(json.dumps({"run": str(args.folder), "images": images, **found}))
    else:
        accuracy = f"top-1 {found['top1']:.2f} %   top-5 {found['top5']:.2f} %"
        print(f"{accuracy}   loss {found['loss']:.4f}   ({images:,} images)")
