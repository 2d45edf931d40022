"""`maskconnect report`: one page about runs, and the figures of the paper from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from maskconnect.cli.verb import add_verb, check_writable, say

EXAMPLE = """report runs/quick-digits-seed0
  maskconnect report runs/demo --out report           every run in a folder, side by side
  maskconnect report runs/a-seed0 runs/a-seed1 --out both"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `report` to the command line."""
    about = "a page to look at runs in, and their figures as SVG and PNG"
    parser = add_verb(commands, "report", run, about, EXAMPLE)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or a folder of them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: RUN/report, of several: report)"
    )
    parser.add_argument("--no-figures", action="store_true", help="only the page, which needs no matplotlib")


def run(args: argparse.Namespace) -> None:
    """Read the runs, write the report, say where it is."""
    from maskconnect.report.runs import read_run
    from maskconnect.report.write import check_place, remove_figures, write_figures, write_page
    from maskconnect.training.folder import find_runs

    found = find_runs(args.runs)
    out = args.out or (found[0] / "report" if len(found) == 1 else Path("report"))
    check_place(out)
    check_writable(out)
    read = []
    for number, path in enumerate(found, start=1):
        _say(f"reading {number}/{len(found)}: {path}")
        read.append(read_run(path))
    page = write_page(read, out)
    figures = []
    if args.no_figures:
        remove_figures(out)
    else:
        figures = write_figures(read, out, _say)
    size = f"{page.stat().st_size / 1e6:.2f} MB"
    say(f"{page}  ({len(read)} run{'s' * (len(read) > 1)}, {size})")
    if figures:
        say(f"{out / 'figures'}  ({len(figures)} files)")


def _say(what: str) -> None:
    say(what, file=sys.stderr)
