"""The parts of `maskconnect reproduce` that train nothing: the overhead of learning, and tables 6 and 7."""

from __future__ import annotations

import argparse
import sys

OVERHEAD = {"resnet38": 1.13, "resnext29-8-8": 1.39}
"""The time of a learning step over one of fixed wiring, as the paper reports it for ResNet and ResNeXt."""


def show_overhead(args: argparse.Namespace, command: str) -> None:
    """Time learning steps and steps of fixed wiring in turn, and print their ratio next to the paper's."""
    from maskconnect.bench.cases import CASES
    from maskconnect.bench.steps import time_steps
    from maskconnect.cli.table import show_table
    from maskconnect.experiments.layout import Table
    from maskconnect.experiments.record import check_place, provenance_here, record
    from maskconnect.training import options
    from maskconnect.training.options import Options

    if args.results is not None:
        check_place(args.results)
    options.prepare(Options(device="cpu", threads=args.threads))
    batch, seconds = (128, 120.0) if args.scale == "paper" else (32, 30.0)
    rows = []
    for name, paper in OVERHEAD.items():
        case = CASES[name]
        print(f"timing {case.about}, batch {batch}", file=sys.stderr, flush=True)
        ratio = time_steps(case, batch, seconds=seconds).describe()["ratios"]["learning_over_frozen"]
        spread = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
        rows.append((case.about, f"{batch}", f"{ratio['median']:.2f}", spread, f"{paper:.2f}"))
    head = ("network", "batch", "ours, median", "range over rounds", "paper")
    note = "Time of a training step that learns masks over one of fixed random wiring, interleaved, on this CPU."
    show_table(head, rows, right=(1, 2, 3, 4))
    print(f"\n{note}")
    if args.results is not None:
        table = Table("overhead: the cost of learning", head, tuple(rows), (note,))
        record(args.results, "overhead", args.scale, table, provenance_here(command, Options(threads=args.threads)))
        print(f"The table is in {args.results}.")


def show_architectures(name: str) -> None:
    """Print table 6 or 7 of the paper."""
    from maskconnect.experiments.architectures import NETWORKS, architecture

    stem, networks = NETWORKS[name]
    for number, (depth, width, cardinality) in enumerate(networks):
        print("\n" * bool(number) + f"{{D={depth}, w={width}, C={cardinality}}}")
        for line in architecture(stem, depth, width, cardinality):
            print(f"  {line}")
