"""`maskconnect bench`: the cost of a training step that learns its wiring, relative to a plain network."""

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

EXAMPLES = """bench resnet38 --batch 32
  maskconnect bench transformer12 --images 16 --seconds 10
  maskconnect bench --out bench.json                          all networks, numbers as JSON"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `bench` to the command line."""
    about = "time training steps that learn the wiring, relative to plain networks"
    parser = add_verb(commands, "bench", run, about, EXAMPLES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="resnet38, resnext29-8-8, ... (default: all)")
    what = parser.add_argument_group("what to time")
    what.add_argument("--batch", type=int, metavar="N", help="images per step (default: depends on the case)")
    what.add_argument(
        "--images", type=int, metavar="N", help="masks learn from about N images per batch (default: all)"
    )
    how = parser.add_argument_group("how to time")
    how.add_argument("--seconds", type=float, default=30.0, metavar="N", help="time per case and batch (default: 30)")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    how.add_argument(
        "--own-loop",
        action="store_true",
        help="do not tune the memory allocator, as in your own training loop (default: tuned, as in `train`)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers as JSON")
    files.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def run(args: argparse.Namespace) -> None:
    """Time every network and batch size, and print the results."""
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
        raise ConfigError(f"--batch is {args.batch}; a batch norm needs 2 images or more. Set --batch to 2 or more.")
    if args.images is not None and args.images < 1:
        raise ConfigError(f"--images is {args.images}; it must be 1 or more.")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder {args.out.parent} does not exist; create it first.")
    if args.out is not None and args.out.exists() and not args.overwrite:
        raise ConfigError(f"--out {args.out} exists; choose another file, or add --overwrite to replace it.")
    options.prepare(Options(device="cpu", threads=args.threads), tune_allocator=not args.own_loop)
    found: dict[str, Any] = {"machine": machine(), "allocator_tuned": not args.own_loop, "images": args.images}
    found["results"] = []
    print(HEAD, flush=True)
    cases = {name: replace(CASES[name], images=args.images) for name in args.cases or CASES}
    work = [(name, batch) for name in cases for batch in (cases[name].batches if args.batch is None else (args.batch,))]
    for number, (name, batch) in enumerate(work, 1):
        case = cases[name]
        if sys.stderr.isatty():  # the result overwrites this line
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


COUNTED = ("learning", "blending")  # the variants whose memory and operations are shown
HEAD = (
    f"{'':22s} {'batch':>5s} {'plain, s':>8s} {'frozen':>7s}  {'learning':11s} {'blending':>8s} {'reference':>9s} "
    f"{'lean':>5s}  {'memory':10s}  {'operations':10s}"
)
FOOT = """
Time of a training step divided by that of a plain network, timed in turn: the median over rounds, in brackets the ratio
of the fastest steps. Each network runs in its fastest form (memory format; torch's SGD), given in the second line.
frozen: random wiring; modules that nothing reads do not run. blending: learning without draws; all candidates are
read, as at the start of Blend. reference: the reference implementation. lean: wide tensors are recomputed in the
backward pass. memory: all tensors at the peak of a step, over plain, for learning and for blending. operations: the
number that torch launches per step, over plain, for the same two; views do not count, and SGD is foreach.
--out FILE writes more numbers.
"""
TUNED = """The memory allocator is tuned for all networks, as in `maskconnect train`. With --own-loop it is not, as in
your own training loop."""
OWN_LOOP = """--own-loop: the memory allocator is not tuned, as in your own training loop. To tune it like
`maskconnect train`, call maskconnect.training.options.keep_memory() before the first step (Linux with glibc)."""


def line(case: Case, result: Result) -> str:
    """Format one result of the table: a line of numbers, and a line of forms."""
    described = result.describe()
    seconds, ratios = described["seconds"]["plain"]["median"], described["ratios"]
    time = {name: f"{ratios[f'{name}_over_plain']['median']:.2f}" for name in case.variants if name != "plain"}
    learning = f"{time['learning']} ({ratios['learning_over_plain']['minima']:.2f})"
    memory, operations = (", ".join(f"{of(name):.2f}" for name in COUNTED) for of in (result.memory, result.operations))
    return (
        f"{case.about:22s} {result.batch:5d} {seconds:8.3f} {time['frozen']:>7s}  {learning:11s} "
        f"{time['blending']:>8s} {time['reference']:>9s} {time.get('lean', ''):>5s}  {memory:10s}  {operations:10s}\n"
        f"  {forms_text(result)}"
    )


def forms_text(result: Result) -> str:
    """Say which variants were fastest in which form."""
    variants: dict[str, list[str]] = {}
    for name, form in result.forms.items():
        variants.setdefault(str(form), []).append(name)
    return "; ".join(f"{form}: {', '.join(names)}" for form, names in variants.items())
