"""`maskconnect prune`: the trained network of a run without what it does not use, and what that has gained."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError

if TYPE_CHECKING:
    from maskconnect.ship.pruning import Report

EXAMPLE = """prune runs/quick-digits-seed0 --out slim
  maskconnect prune runs/quick-digits-seed0 --out slim --no-fold --no-merge   # batch norms and names stay
  maskconnect predict slim picture.png"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `prune` to the command line."""
    about = "remove what a trained network does not use, prove it, measure it, save it"
    parser = add_verb(commands, "prune", run, about, EXAMPLE)
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run that has ended, or a saved frozen network")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to save it (default: RUN/pruned)")
    parser.add_argument("--no-fold", action="store_true", help="keep batch norms, instead of folding them in")
    parser.add_argument("--no-merge", action="store_true", help="keep every convolution by itself")
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="random wirings to compare (default: 200)")
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[1, 64], metavar="N", help="at which to time; none: do not"
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="of timing a batch (default: 10)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    parser.add_argument("--overwrite", action="store_true", help="replace the network that is in DIR")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    """Prune, save, and print what that has gained."""
    out = args.out or args.folder / "pruned"
    if out.exists() and not args.overwrite and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; choose another place by --out, or replace what is in it by --overwrite.")
    from maskconnect.ship.pruning import Measures, prune_saved
    from maskconnect.ship.saved import save
    from maskconnect.ship.trained import open_folder
    from maskconnect.training import options
    from maskconnect.training.files import write_atomically
    from maskconnect.training.options import Options

    options.prepare(Options(device="cpu", threads=args.threads))
    measures = Measures(draws=args.draws, batches=tuple(args.batches), seconds=args.seconds)
    saved, report = prune_saved(
        open_folder(args.folder), fold=not args.no_fold, merge=not args.no_merge, measures=measures, say=_say
    )
    save(saved.network, out, classes=saved.classes, preprocessing=saved.preprocessing)
    described = json.dumps(report.describe(), indent=1)
    write_atomically(out / "report.json", described + "\n")
    if args.json:
        print(described)
    else:
        show_report(report)
        print(f"\nSaved in {out}; the same numbers are in {out / 'report.json'}. Next:")
        print(f"  maskconnect predict {out} PICTURE...\n  maskconnect export {out} --onnx {out / 'model.onnx'}")


def show_report(report: Report) -> None:
    """The report as a person reads it."""
    from maskconnect.cli.table import show_table

    count, macs, (before, after) = report.parameters, report.macs, report.modules
    rows: list[tuple[str, ...]] = [("modules", f"{before}", f"{after}", f"{before}")]
    rows.append(("parameters", f"{count['frozen']:,}", f"{count['transitive']:,}", f"{count['frozen']:,}"))
    rows.append(("  by the paper's one-step rule", "", f"{count['one_step']:,}", ""))
    rows.append(("  as written", "", f"{count['written']:,}", ""))
    rows.append(("million multiply-adds", *(_millions(macs[name]) for name in ("frozen", "pruned", "plain"))))
    ratios = []
    for timing in (t.describe() for t in report.timings):
        name = f"batch {timing['batch']}"
        rows.append((f"ms, {name}", *(_number(timing[f"{kind}_ms"]) for kind in ("frozen", "pruned", "plain"))))
        over = [
            f"{_number(timing['pruned_over_frozen'])} of frozen",
            f"{_number(timing['pruned_over_plain'])} of plain",
        ]
        ratios.append(f"{name}: {over[0]}, {over[1]}")
    show_table(("", "frozen", "pruned", "plain"), rows, right=(1, 2, 3))
    if ratios:
        print(f"\nTime of the pruned network (median of interleaved rounds): {'; '.join(ratios)}")
    left = report.random.transitive
    print(
        f"\nRandom wiring of the same K would leave {left.mean:,.0f} parameters (deviation {left.deviation:,.0f}, "
        f"{left.smallest:,} to {left.largest:,}, {len(left.draws)} draws).\n"
        f"{100 * left.share_that_lost_as_much():.0f} % of draws lost as much as this wiring, or more."
    )
    print(f"\nOutputs differ by {report.difference:.1e} of the largest at most ({report.allowed:.0e} is allowed).")


def _millions(macs: int | None) -> str:
    return "" if macs is None else f"{macs / 1e6:,.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)
