"""`maskconnect bench`: how much longer a step takes that learns its wiring than one of a plain network."""

from __future__ import annotations

import argparse
import json
import math
import sys
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
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}.")
    options.prepare(Options(device="cpu", threads=args.threads))
    found: dict[str, Any] = {"machine": machine(), "results": []}
    print(HEAD, flush=True)
    cases = {name: CASES[name] for name in args.cases or CASES}
    work = [(name, batch) for name in cases for batch in (cases[name].batches if args.batch is None else (args.batch,))]
    for number, (name, batch) in enumerate(work, 1):
        case = cases[name]
        if sys.stderr.isatty():  # the line of the result goes over it
            print(
                f"timing {case.about}, batch {batch} ({number} of {len(work)})", end="\r", file=sys.stderr, flush=True
            )
        result = time_steps(case, batch, seconds=args.seconds)
        found["results"].append({"case": name, "bar": case.bar, "aim": case.aim, **result.describe()})
        print(line(case, result), flush=True)
        if args.out is not None:
            write_atomically(args.out, json.dumps(found, indent=1) + "\n")
    print(FOOT)


VARIANTS = ("frozen", "learning", "blending", "reference", "lean")
KEPT = ("learning", "blending", "lean")  # whose memory is shown
HEAD = (
    f"{'':22s} {'batch':>5s} {'plain, s':>8s}  {'frozen':16s}{'learning':16s}{'blending':>8s} "
    f"{'reference':>9s} {'lean':>5s} {'bar':>5s}  memory"
)
FOOT = """
Interleaved training steps over those of a plain network, each in its faster memory layout: the median over rounds, in
brackets that of the fastest steps. blending: learning without draws, all candidates read in part, as at its beginning;
reference: learning in the readable way; lean: learning with wide tensors made again, not kept. Memory of learning, of
blending and of lean, over plain: all tensors at the peak of a step. --out FILE has more."""


def line(case: Case, result: Result) -> str:
    """One line of the table."""
    described = result.describe()
    seconds, ratios = described["seconds"]["plain"]["median"], described["ratios"]
    cells = {name: ratios.get(f"{name}_over_plain", {"median": math.nan, "minima": math.nan}) for name in VARIANTS}
    both = [f"{cells[name]['median']:.2f} ({cells[name]['minima']:.2f})" for name in ("frozen", "learning")]
    rest = [f"{cells[name]['median']:.2f}".replace("nan", "") for name in ("blending", "reference", "lean")]
    memory = ", ".join(f"{result.memory(name):.2f}" for name in KEPT if name in case.variants)
    return (
        f"{case.about:22s} {result.batch:5d} {seconds:8.3f}  {both[0]:16s}{both[1]:16s}{rest[0]:>8s} {rest[1]:>9s} "
        f"{rest[2]:>5s} {case.bar:5.2f}  {memory}"
    )
