"""`maskconnect bench`: how much longer a step takes that learns its wiring than one of a plain network."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
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
    parser.add_argument(
        "--batch", type=int, metavar="N", help="images per step (default: those of the case, 128 and 32)"
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help="masks learn from about N images of a batch (default: from all)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, metavar="N", help="of timing each (default: 30)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    parser.add_argument(
        "--own-loop",
        action="store_true",
        help="do not tune the memory allocator, as in a training loop of your own (default: tuned, as by `train`)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all numbers there as JSON")


def run(args: argparse.Namespace) -> None:
    """Time, and print the result of every network and batch size."""
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
    if args.images is not None and args.images < 1:
        raise ConfigError(f"--images is {args.images}; it must be 1 or more.")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}.")
    options.prepare(Options(device="cpu", threads=args.threads), tune_allocator=not args.own_loop)
    found: dict[str, Any] = {"machine": machine(), "allocator_tuned": not args.own_loop, "images": args.images}
    found["results"] = []
    print(HEAD, flush=True)
    cases = {name: replace(CASES[name], images=args.images) for name in args.cases or CASES}
    work = [(name, batch) for name in cases for batch in (cases[name].batches if args.batch is None else (args.batch,))]
    for number, (name, batch) in enumerate(work, 1):
        case = cases[name]
        if sys.stderr.isatty():  # the line of the result goes over it
            print(
                f"timing {case.about}, batch {batch} ({number} of {len(work)})", end="\r", file=sys.stderr, flush=True
            )
        result = time_steps(case, batch, seconds=args.seconds)
        found["results"].append(
            {"case": name, "bar": case.bar.at(batch), "aim": case.aim.at(batch), **result.describe()}
        )
        print(line(case, result), flush=True)
        if args.out is not None:
            write_atomically(args.out, json.dumps(found, indent=1) + "\n")
    print(FOOT + (OWN_LOOP if args.own_loop else TUNED))


COUNTED = ("learning", "blending")  # whose memory and operations are shown
HEAD = (
    f"{'':22s} {'batch':>5s} {'plain, s':>8s} {'frozen':>7s}  {'learning':11s} {'blending':>8s} {'reference':>9s} "
    f"{'lean':>5s}  {'memory':10s}  {'operations':10s}  {'bar':>5s} {'aim':>5s}"
)
FOOT = """
Interleaved training steps over those of a plain network, each in the fastest of its forms (memory layout; torch's SGD),
which the second line names: the median over rounds, in brackets the ratio of the fastest steps. frozen: random wiring,
which does not run modules that nothing reads. blending: learning without draws, all candidates read in part, as at its
beginning. reference: learning in the readable way. lean: wide tensors are recomputed in the backward pass.
memory: all tensors at the peak of a step, over plain; of learning, of blending. operations: how many torch starts per
step, over plain, likewise; views do not count, and the optimizer is foreach. bar and aim: of the time of learning.
--out FILE has more.
"""
TUNED = """The memory allocator is tuned for all networks, as in `maskconnect train`; --own-loop leaves it as it is in a
training loop of your own."""
OWN_LOOP = """--own-loop: the memory allocator is not tuned, as in a training loop of your own. To tune it like
`maskconnect train`, call maskconnect.training.options.keep_memory() before the first step (Linux with glibc)."""


def line(case: Case, result: Result) -> str:
    """One result in the table: a line of numbers, and a line of forms."""
    described = result.describe()
    seconds, ratios = described["seconds"]["plain"]["median"], described["ratios"]
    time = {name: f"{ratios[f'{name}_over_plain']['median']:.2f}" for name in case.variants if name != "plain"}
    learning = f"{time['learning']} ({ratios['learning_over_plain']['minima']:.2f})"
    memory, operations = (", ".join(f"{of(name):.2f}" for name in COUNTED) for of in (result.memory, result.operations))
    bar, aim = (limits.time.get(result.batch) for limits in (case.bar, case.aim))
    shown = [f"{limit:.2f}" if limit is not None else "" for limit in (bar, aim)]
    return (
        f"{case.about:22s} {result.batch:5d} {seconds:8.3f} {time['frozen']:>7s}  {learning:11s} "
        f"{time['blending']:>8s} {time['reference']:>9s} {time.get('lean', ''):>5s}  {memory:10s}  {operations:10s}  "
        f"{shown[0]:>5s} {shown[1]:>5s}\n  {said_forms(result)}"
    )


def said_forms(result: Result) -> str:
    """Which variants were fastest in which form."""
    variants: dict[str, list[str]] = {}
    for name, form in result.forms.items():
        variants.setdefault(str(form), []).append(name)
    return "; ".join(f"{form}: {', '.join(names)}" for form, names in variants.items())
