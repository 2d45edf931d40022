"""`maskconnect bench`: how much longer a step takes that learns its wiring than one of a plain network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from maskconnect.bench.cases import Case
    from maskconnect.bench.steps import Result

EXAMPLE = """bench resnet38 --batch 32
  maskconnect bench --out bench.json"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `bench` to the command line."""
    about = "what learning connectivity costs: training steps beside those of plain networks"
    parser = add_verb(commands, "bench", run, about, EXAMPLE)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="resnet38, resnext29-8-8, ... (default: all)")
    parser.add_argument("--batch", type=int, metavar="N", help="images a step (default: 128 and 32; 8 for the largest)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="N", help="of timing each (default: 30)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers there as JSON")


def run(args: argparse.Namespace) -> None:
    """Time, and print a line a network and batch size."""
    from maskconnect.bench.cases import CASES
    from maskconnect.bench.machine import machine
    from maskconnect.bench.steps import time_steps
    from maskconnect.training import options
    from maskconnect.training.files import write_atomically
    from maskconnect.training.options import Options

    for name in args.cases:
        if name not in CASES:
            raise unknown_name("the case", name, CASES)
    if args.batch is not None and args.batch < 2:
        raise ConfigError(f"--batch is {args.batch}; a batch norm needs 2 images or more.")
    options.prepare(Options(device="cpu", threads=args.threads))
    found: dict[str, Any] = {"machine": machine(), "results": []}
    print(HEAD)
    for name in args.cases or CASES:
        case = CASES[name]
        for batch in case.batches if args.batch is None else (args.batch,):
            result = time_steps(case, batch, seconds=args.seconds)
            found["results"].append({"case": name, "bar": case.bar, "aim": case.aim, **result.describe()})
            print(line(case, result), flush=True)
            if args.out is not None:
                write_atomically(args.out, json.dumps(found, indent=1) + "\n")
    print(
        "\nTimes are of interleaved training steps, each network in its faster memory layout. Ratios are medians over"
    )
    print("rounds; those of the fastest steps and the spread are in brackets.")


HEAD = f"{'':24s} {'batch':>5s} {'plain, s':>9s} {'frozen / plain':>22s} {'learning / plain':>22s} {'bar':>5s}"


def line(case: Case, result: Result) -> str:
    """One line of the table."""
    described = result.describe()
    seconds, ratios = described["seconds"]["plain"]["median"], described["ratios"]
    cells = [_ratio(ratios[f"{name}_over_plain"]) for name in ("frozen", "learning")]
    return f"{case.about:24s} {result.batch:5d} {seconds:9.3f} {cells[0]:>22s} {cells[1]:>22s} {case.bar:5.2f}"


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['minima']:.2f}; {ratio['lowest']:.2f}-{ratio['highest']:.2f})"
