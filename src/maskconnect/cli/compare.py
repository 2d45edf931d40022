"""`maskconnect compare`: compare finished runs in pairs of equal seeds, with intervals and a verdict."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from maskconnect.experiments.compare import Side

SETS = ("test", "validation")
SMALLEST = 1e-6
"""The smallest difference, in points, that `--see` accepts; below it the number of pairs grows without bound."""

EXAMPLES = """compare runs/digits-prev runs/quick-digits-sweep   the first folder is the baseline
  maskconnect compare kept/*.json --on validation --see 0.5   results that `sweep --keep` wrote
  maskconnect compare a b c --baseline a --baseline b         one column per baseline"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `compare` to the command line."""
    about = "compare finished runs seed by seed, with confidence intervals and a verdict"
    parser = add_verb(commands, "compare", run, about, EXAMPLES)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="run folders, kept results (.json), or folders of either"
    )
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="RUN",
        type=Path,
        help="the baseline recipe (default: that of the first RUN); repeatable, one column per baseline",
    )
    what.add_argument(
        "--on",
        default="test",
        metavar="SET",
        help="test or validation accuracy; use validation to choose (default: test)",
    )
    what.add_argument("--seeds", metavar="N", help="compare only the first N seeds, or a range: 9..20")
    what.add_argument(
        "--see", type=float, metavar="POINTS", help="also print how many pairs would detect a difference of POINTS"
    )
    what.add_argument("--parameters", action="store_true", help="also print the number of parameters after pruning")
    output = parser.add_argument_group("output")
    output.add_argument("--names", nargs="+", metavar="NAME", help="names of the rows, baselines first")
    output.add_argument(
        "--figure", metavar="PLACE", type=Path, help="also draw PLACE.svg and PLACE.png, or replace them"
    )
    output.add_argument("--markdown", action="store_true", help="print a Markdown table")
    output.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Compare with the first recipe, or with each of several baselines."""
    from maskconnect.experiments.compare import sides_of
    from maskconnect.experiments.grid import seeds_of

    if args.on not in SETS:
        raise unknown_name("--on", args.on, SETS)
    if args.see is not None and not SMALLEST <= args.see < math.inf:
        raise ConfigError(f"--see is {args.see}; it must be at least {SMALLEST} points. Pass a difference such as 0.5.")
    several = len(args.baseline) > 1
    if several and (args.json or args.figure is not None or args.see is not None):
        raise ConfigError("--json, --figure and --see work with one --baseline only; leave the others out.")
    seeds = None if args.seeds is None else seeds_of(args.seeds)
    sides = sides_of([*args.baseline, *args.runs], args.on, seeds)
    if args.names:
        if len(args.names) != len(sides):
            found = "; ".join(side.label for side in sides)
            raise ConfigError(
                f"--names has {len(args.names)}, but there are {len(sides)} rows; pass one name per row: {found}."
            )
        sides = [replace(side, label=name) for side, name in zip(sides, args.names, strict=True)]
    if args.figure is not None:
        _draw(sides, args.on, args.figure)
    if args.json:
        print(json.dumps(_plain(sides, args.see)))
        return
    if several:
        head, rows = _against_each(sides, len(sides_of(args.baseline, args.on, seeds)))
    else:
        head, rows = _against_first(sides, args.see)
    head[2] = f"{args.on} accuracy, %"
    notes = ["Accuracy is that of the last epoch. Differences are paired by seed; intervals are Student's."]
    if args.see is not None:
        notes.append(
            f"With this number of pairs, four of five experiments would detect a true difference of {args.see:g}."
        )
    if args.parameters:
        from maskconnect.training.statistics import difference_by_seed, statistic

        head += ["parameters after pruning", *([] if several else ["difference of parameters"])]
        for row, side in zip(rows, sides, strict=True):
            row.append(statistic(list(side.left.values())).text(digits=0))
            if not several:
                row.append("" if side is sides[0] else difference_by_seed(side.left, sides[0].left).text(digits=0))
    if args.markdown:
        from maskconnect.experiments.layout import Table

        print(Table("", tuple(head), tuple(map(tuple, rows)), tuple(notes)).markdown().partition("\n\n")[2], end="")
        return
    from maskconnect.cli.table import show_table

    show_table(head, rows, right=[n for n, title in enumerate(head) if title])
    print("\n" + "\n".join(notes))


def _against_first(sides: list[Side], see: float | None) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: all rows compared with the first."""
    baseline, *others = sides
    differences = [side.against(baseline) for side in others]
    head = ["", "seeds", "accuracy", "difference", "95 % interval", ""]
    rows = [[*_accuracy(baseline), "", "", "the baseline"]]
    for side, d in zip(others, differences, strict=True):
        interval = "" if d.interval is None else f"{d.interval[0]:+.2f} to {d.interval[1]:+.2f}"
        rows.append([*_accuracy(side), f"{d.mean:+.2f}" if d.count else "", interval, d.verdict])
    if see is not None:
        head.append(f"pairs to see {see:g}")
        for row, needed in zip(rows, ["", *(d.pairs_to_see(see) or "" for d in differences)], strict=True):
            row.append(f"{needed}")
    return head, rows


def _against_each(sides: list[Side], count: int) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: all rows compared with each of the first `count`."""
    baselines = sides[:count]
    head = ["", "seeds", "accuracy", *(f"over {baseline.label}" for baseline in baselines)]
    rows = [
        [*_accuracy(side), *("" if side is baseline else side.against(baseline).text() for baseline in baselines)]
        for side in sides
    ]
    return head, rows


def _accuracy(side: Side) -> tuple[str, str, str]:
    return side.label, f"{len(side.accuracy)}", side.statistic.text()


def _plain(sides: list[Side], see: float | None) -> dict[str, Any]:
    """Return the comparison as plain data, for --json."""
    baseline, *others = sides
    found = []
    for side in others:
        d = side.against(baseline)
        line = {
            "label": side.label,
            "accuracy": side.accuracy,
            "parameters": side.left,
            "pairs": d.count,
            "difference": d.mean if d.count else None,
            "interval": d.interval,
            "verdict": d.verdict,
            "deviation": d.deviation,
        }
        found.append(line if see is None else line | {"pairs_needed": d.pairs_to_see(see)})
    first = {"label": baseline.label, "accuracy": baseline.accuracy, "parameters": baseline.left}
    return {"baseline": first, "others": found}


def _draw(sides: list[Side], on: str, figure: Path) -> None:
    """Draw the differences from the first row, and say which files were written or replaced."""
    from maskconnect.report.differences import Row, write_differences

    baseline, *others = sides
    place = figure.with_suffix("") if figure.suffix in (".svg", ".png") else figure
    place.parent.mkdir(parents=True, exist_ok=True)
    action = "replaced" if any(Path(f"{place}{kind}").exists() for kind in (".svg", ".png")) else "wrote"
    write_differences([Row(side.label, side.against(baseline)) for side in others], baseline.label, on, place)
    say(f"{action} {place}.svg and {place}.png", file=sys.stderr)
