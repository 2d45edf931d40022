"""`maskconnect compare`: finished runs in pairs of equal seeds, with intervals and a plain verdict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from maskconnect.cli.verb import add_verb

EXAMPLE = """compare runs/quick-digits-prev-seed* runs/quick-digits-seed*
  maskconnect compare runs/digits-prev runs/digits-sweep        folders of runs; the first recipe is the baseline"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `compare` to the command line."""
    about = "compare finished runs, seed by seed, with intervals and a verdict"
    parser = add_verb(commands, "compare", run, about, EXAMPLE)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--baseline", metavar="RUN", type=Path, help="compare with its recipe (default: the first)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Compare with the first recipe that is named."""
    from maskconnect.experiments.compare import sides_of

    baseline, *others = sides_of([args.baseline, *args.runs] if args.baseline is not None else args.runs)
    differences = [side.against(baseline) for side in others]
    if args.json:
        found = [
            {
                "label": side.label,
                "accuracy": side.accuracy,
                "pairs": d.count,
                "difference": d.mean if d.count else None,
                "interval": d.interval,
                "verdict": d.verdict,
            }
            for side, d in zip(others, differences, strict=True)
        ]
        print(json.dumps({"baseline": {"label": baseline.label, "accuracy": baseline.accuracy}, "others": found}))
        return
    from maskconnect.cli.table import show_table

    rows = [(baseline.label, f"{len(baseline.accuracy)}", baseline.statistic.text(), "", "", "the baseline")]
    for side, d in zip(others, differences, strict=True):
        interval = "" if d.interval is None else f"{d.interval[0]:+.2f} to {d.interval[1]:+.2f}"
        mean = f"{d.mean:+.2f}" if d.count else ""
        rows.append((side.label, f"{len(side.accuracy)}", side.statistic.text(), mean, interval, d.verdict))
    show_table(("", "seeds", "test accuracy, %", "difference", "95 % interval", ""), rows, right=(1, 2, 3, 4))
    print("\nAccuracy is that of the last epoch. Differences are of equal seeds, intervals Student's.")
