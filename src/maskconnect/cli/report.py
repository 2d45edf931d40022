"""`maskconnect report`: one page about runs, and the figures of the paper from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from maskconnect.cli.verb import add_verb, check_writable, say

EXAMPLE = """report runs/quick-digits-seed0 --open
  maskconnect report runs/mine                        a folder that mc.Recorder wrote
  maskconnect report runs/demo --out report           every run in a folder, side by side
  maskconnect report runs/a-seed0 runs/a-seed1 --out both"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `report` to the command line."""
    about = "write a page that shows runs, and their figures as SVG and PNG"
    parser = add_verb(commands, "report", run, about, EXAMPLE)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or a folder of runs")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: RUN/report; for several runs: report)"
    )
    parser.add_argument("--no-figures", action="store_true", help="write only the page, which needs no matplotlib")
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")


def run(args: argparse.Namespace) -> None:
    """Read the runs, write the report, and print its path."""
    from maskconnect.report.recorded import find_all, read_any
    from maskconnect.report.write import check_place, remove_figures, write_figures, write_page

    found = find_all(args.runs)
    out = args.out or (found[0] / "report" if len(found) == 1 else Path("report"))
    check_place(out)
    check_writable(out)
    read = []
    for number, path in enumerate(found, start=1):
        _say(f"reading {number}/{len(found)}: {path}")
        read.append(read_any(path))
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
    if args.open:
        _open(page)


def _open(page: Path) -> None:
    """Open the page in a browser; a machine without one is not an error."""
    import webbrowser

    try:
        opened = webbrowser.open(page.resolve().as_uri())
    except webbrowser.Error:
        opened = False
    if not opened:
        _say(f"there is no browser on this machine; open {page} in one.")


def _say(what: str) -> None:
    say(what, file=sys.stderr)
