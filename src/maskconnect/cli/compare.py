"""`maskconnect compare`: finished runs in pairs of equal seeds, with intervals and a plain verdict."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError, unknown_name

SETS = ("test", "validation")
EXAMPLE = """compare runs/quick-digits-prev-seed* runs/quick-digits-seed*
  maskconnect compare runs/digits-prev runs/digits-sweep        folders of runs; the first recipe is the baseline
  maskconnect compare kept/*.json --on validation --see 0.5     results that `sweep --keep` has kept
  maskconnect compare kept/*.json --seeds 9..20                 those alone, which served for no choice
  maskconnect compare kept/*.json --figure differences          a figure of it: differences.svg and .png
  maskconnect compare kept/*.json --parameters                  what pruning leaves, too"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `compare` to the command line."""
    about = "compare finished runs, seed by seed, with intervals and a verdict"
    parser = add_verb(commands, "compare", run, about, EXAMPLE)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="run folders, kept results (.json), or folders of either"
    )
    parser.add_argument("--baseline", metavar="RUN", type=Path, help="compare with its recipe (default: the first)")
    parser.add_argument(
        "--on", default="test", metavar="SET", help="test (the default), or validation, where a choice is to be made"
    )
    parser.add_argument("--seeds", metavar="N", help="of these alone: how many, from 0 on, or which: 9..20")
    parser.add_argument(
        "--see", type=float, metavar="POINTS", help="also say how many pairs it takes to see a difference so large"
    )
    parser.add_argument("--parameters", action="store_true", help="also say how many parameters pruning leaves")
    parser.add_argument("--figure", metavar="PLACE", type=Path, help="also draw it, as PLACE.svg and PLACE.png")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Compare with the first recipe that is named."""
    from maskconnect.experiments.compare import sides_of
    from maskconnect.experiments.grid import seeds_of

    if args.on not in SETS:
        raise unknown_name("--on", args.on, SETS)
    if args.see is not None and not 0 < args.see < math.inf:
        raise ConfigError(f"--see is {args.see}; it must be a difference above 0, such as 0.5.")
    places = args.runs if args.baseline is None else [args.baseline, *args.runs]
    baseline, *others = sides_of(places, args.on, None if args.seeds is None else seeds_of(args.seeds))
    differences = [side.against(baseline) for side in others]
    if args.figure is not None:
        from maskconnect.report.differences import Row, write_differences

        drawn = [Row(side.label, d) for side, d in zip(others, differences, strict=True)]
        place = args.figure.with_suffix("") if args.figure.suffix in (".svg", ".png") else args.figure
        place.parent.mkdir(parents=True, exist_ok=True)
        write_differences(drawn, baseline.label, args.on, place)
    if args.json:
        found = [
            {
                "label": side.label,
                "accuracy": side.accuracy,
                "parameters": side.left,
                "pairs": d.count,
                "difference": d.mean if d.count else None,
                "interval": d.interval,
                "verdict": d.verdict,
                "deviation": d.deviation,
            }
            | ({} if args.see is None else {"pairs_needed": d.pairs_to_see(args.see)})
            for side, d in zip(others, differences, strict=True)
        ]
        first = {"label": baseline.label, "accuracy": baseline.accuracy, "parameters": baseline.left}
        print(json.dumps({"baseline": first, "others": found}))
        return
    from maskconnect.cli.table import show_table
    from maskconnect.experiments.layout import Table
    from maskconnect.training.statistics import statistic

    rows: list[tuple[str, ...]] = [
        (baseline.label, f"{len(baseline.accuracy)}", baseline.statistic.text(), "", "", "the baseline")
    ]
    for side, d in zip(others, differences, strict=True):
        interval = "" if d.interval is None else f"{d.interval[0]:+.2f} to {d.interval[1]:+.2f}"
        mean = f"{d.mean:+.2f}" if d.count else ""
        rows.append((side.label, f"{len(side.accuracy)}", side.statistic.text(), mean, interval, d.verdict))
    head: tuple[str, ...] = ("", "seeds", f"{args.on} accuracy, %", "difference", "95 % interval", "")
    notes = ["Accuracy is that of the last epoch. Differences are of equal seeds, intervals Student's."]
    if args.see is not None:
        head += (f"pairs to see {args.see:g}",)
        needed = ["", *(f"{d.pairs_to_see(args.see) or ''}" for d in differences)]
        rows = [(*row, pairs) for row, pairs in zip(rows, needed, strict=True)]
        notes.append(f"Of experiments with so many pairs, four of five would show a true difference of {args.see:g}.")
    if args.parameters:
        head += ("parameters after pruning",)
        left = [statistic(list(side.left.values())).text(digits=0) for side in (baseline, *others)]
        rows = [(*row, parameters) for row, parameters in zip(rows, left, strict=True)]
    if args.markdown:
        print(Table("", head, tuple(rows), tuple(notes)).markdown().partition("\n\n")[2], end="")
        return
    show_table(head, rows, right=(1, 2, 3, 4, 6, 7))
    print("\n" + "\n".join(notes))
