"""`maskconnect prune`: remove the unused modules of a trained network, and measure the gain."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.verb import add_verb, check_writable
from maskconnect.errors import ConfigError, shown

if TYPE_CHECKING:
    from torch import nn

    from maskconnect.ship.pruning import Report

KINDS = ("frozen", "pruned", "plain")
REPORT = "report.json"
PRUNING = ".pruning"
"""The lock file of a new folder; if it remains, the process that wrote there was killed or failed."""

EXAMPLES = """prune runs/quick-digits-seed0 --out slim
  maskconnect prune runs/quick-digits-seed0 --out slim --no-fold --no-merge    keep batch norms
  maskconnect predict slim picture.png                                         use the result

A folder that already holds a network is an error; --overwrite replaces it."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `prune` to the command line."""
    about = "remove the unused modules of a trained network, check that its outputs stay the same, and save it"
    parser = add_verb(commands, "prune", run, about, EXAMPLES)
    parser.add_argument("folder", metavar="RUN", type=Path, help="a finished run, or a saved frozen network")
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="DIR", help="where to save the result (default: RUN/pruned)")
    files.add_argument("--overwrite", action="store_true", help="replace the network in DIR")
    files.add_argument("--data", type=Path, metavar="DIR", help="the folder of the data set, to test both networks")
    how = parser.add_argument_group("what to change")
    how.add_argument(
        "--no-fold", action="store_true", help="keep batch norms instead of folding them into convolutions"
    )
    how.add_argument("--no-merge", action="store_true", help="do not merge parallel convolutions")
    measure = parser.add_argument_group("what to measure")
    measure.add_argument("--draws", type=int, default=200, metavar="N", help="random wirings to compare (default: 200)")
    measure.add_argument(
        "--batches", default="1,64", metavar="N,N", help="batch sizes to time (default: 1,64; '' for none)"
    )
    measure.add_argument(
        "--seconds", type=float, default=10.0, metavar="N", help="longest time per batch size (default: 10)"
    )
    measure.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    measure.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    """Prune, save, and print the gain."""
    out = args.out or args.folder / "pruned"
    _check_place(out, overwrite=args.overwrite)
    from maskconnect.ship.pruning import Measures, prune_saved, report_of
    from maskconnect.ship.saved import save
    from maskconnect.ship.trained import open_folder
    from maskconnect.training import options
    from maskconnect.training.files import held, remove_unfinished, write_atomically
    from maskconnect.training.options import Options

    options.prepare(Options(device="cpu", threads=args.threads))
    measures = Measures(draws=args.draws, batches=_batches(args.batches), seconds=args.seconds)
    before, how = open_folder(args.folder), {"fold": not args.no_fold, "merge": not args.no_merge}
    _say("pruning")
    after, difference = prune_saved(before, **how)
    (out / REPORT).unlink(missing_ok=True)  # it may be that of another network
    out.mkdir(parents=True, exist_ok=True)
    with nullcontext() if args.overwrite else held(out / PRUNING):
        remove_unfinished(out)
        save(after.network, out, classes=after.classes, preprocessing=after.preprocessing)
        found: dict[str, Any] = {"of": str(args.folder), **how, **_accuracies(args, before.network, after.network)}
        report = report_of(before, after, difference, measures, **how, say=_say)
        found |= report.describe()
        write_atomically(out / REPORT, json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found, indent=1))
        return
    show_report(report, found.get("accuracy"))
    place = shlex.quote(str(out))
    print(f"\nSaved the network in {out}, and these numbers in {out / REPORT}. Next:")
    print(f"  maskconnect predict {place} IMAGE...\n  maskconnect export {place} --onnx {shlex.quote(out.name)}.onnx")


def show_report(report: Report, accuracy: dict[str, float] | None) -> None:
    """Print the report as tables and sentences."""
    from maskconnect.cli.table import show_table

    count, macs = report.parameters, report.macs
    rows: list[tuple[str, ...]] = [("modules", *(_count(report.modules[kind]) for kind in KINDS))]
    rows.append(("parameters", *(_count(count[kind]) for kind in ("frozen", "transitive", "plain"))))
    rows.append(("  by the paper's one-step rule", "", _count(count["one_step"]), ""))
    rows.append(("  as saved: folded, merged", "", _count(count["written"]), ""))
    rows.append(("million multiply-adds", *(_millions(macs[kind]) for kind in KINDS)))
    for timing in (t.describe() for t in report.timings):
        rows.append((f"ms at batch {timing['batch']}", *(_number(timing[f"{kind}_ms"]) for kind in KINDS)))
        over = [_number(timing[f"pruned_over_{kind}"]) for kind in ("frozen", "plain")]
        rows.append(("  pruned over this", over[0], "", over[1]))
    if accuracy is not None:
        rows.append(("test accuracy, %", f"{accuracy['frozen']:.2f}", f"{accuracy['pruned']:.2f}", ""))
    show_table(("", "frozen", "pruned", report.plain or "plain"), rows, right=(1, 2, 3))
    print("\nA frozen network does not run unused modules. Times are interleaved; their ratios are medians.")
    if report.random is not None:
        left = report.random.transitive
        spread = f"{left.smallest:,} to {left.largest:,} in {len(left.draws)} draws,\ndeviation {left.deviation:,.0f}"
        share = f"{100 * left.share_that_lost_as_much():.0f} % of draws lost as many as this wiring, or more"
        print(f"Random wiring of the same K would leave {left.mean:,.0f} parameters ({spread}); {share}.")
    print(f"Outputs differ by at most {report.difference:.1e} of the largest ({report.allowed:.0e} is allowed).")


def _check_place(out: Path, *, overwrite: bool) -> None:
    """Fail before the work, not after it, if nothing can or should be written there."""
    if (out / "recipe.toml").exists():
        raise ConfigError(f"{out} is a run folder; choose another folder with --out.")
    if (out / PRUNING).exists():  # an earlier process was killed or failed here
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / "maskconnect.json").exists():
            raise ConfigError(f"{out} exists and does not hold a saved network; choose another folder with --out.")
        if not overwrite:
            raise ConfigError(f"{out} exists; choose another folder with --out, or add --overwrite to replace it.")
    check_writable(out)


def _batches(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"--batches is {shown(text)}; it must be batch sizes, such as 1,64.")
    return tuple(map(int, words))


def _accuracies(args: argparse.Namespace, frozen: nn.Module, pruned: nn.Module) -> dict[str, dict[str, float]]:
    """Return the accuracy of both on the test set of the run, if its images are available."""
    from maskconnect.training.loading import accuracies
    from maskconnect.training.options import Options

    if not (args.folder / "recipe.toml").exists():
        if args.data is not None:
            raise ConfigError(f"{args.folder} is not a run, so its test set is unknown; leave --data out.")
        return {}
    found = accuracies(args.folder, Options(device="cpu", data=args.data), [frozen, pruned])
    return {} if found is None else {"accuracy": dict(zip(("frozen", "pruned"), found, strict=True))}


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _millions(macs: int | None) -> str:
    return "" if macs is None else f"{macs / 1e6:,.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)
