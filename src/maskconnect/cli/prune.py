"""`maskconnect prune`: the trained network of a run without what it does not use, and what that has gained."""

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
"""The file by which a process holds a new folder; where it stays, the process was killed or failed."""

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
    parser.add_argument("--batches", default="1,64", metavar="N,N", help="at which to time (default: 1,64; none: '')")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="N", help="of timing at each batch, at most (default: 10)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="the run's data set, to test both networks on")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    parser.add_argument("--overwrite", action="store_true", help="replace the network that is in DIR")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    """Prune, save, and print what that has gained."""
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
    after, apart = prune_saved(before, **how)
    (out / REPORT).unlink(missing_ok=True)  # that of another network, perhaps
    out.mkdir(parents=True, exist_ok=True)
    with nullcontext() if args.overwrite else held(out / PRUNING):
        remove_unfinished(out)
        save(after.network, out, classes=after.classes, preprocessing=after.preprocessing)
        found: dict[str, Any] = {"of": str(args.folder), **how, **_accuracies(args, before.network, after.network)}
        report = report_of(before, after, apart, measures, **how, say=_say)
        found |= report.describe()
        write_atomically(out / REPORT, json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found, indent=1))
        return
    show_report(report, found.get("accuracy"))
    place = shlex.quote(str(out))
    print(f"\nSaved in {out}; these numbers are in {out / REPORT}. Next:")
    print(f"  maskconnect predict {place} PICTURE...\n  maskconnect export {place} --onnx {shlex.quote(out.name)}.onnx")


def show_report(report: Report, accuracy: dict[str, float] | None) -> None:
    """The report as a person reads it."""
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
    print("\nA frozen network does not run what it does not use. Times are interleaved; their ratios are medians.")
    if report.random is not None:
        left = report.random.transitive
        spread = f"{left.smallest:,} to {left.largest:,} in {len(left.draws)} draws,\ndeviation {left.deviation:,.0f}"
        share = f"{100 * left.share_that_lost_as_much():.0f} % of draws lost as much as this wiring, or more"
        print(f"Random wiring of the same K would leave {left.mean:,.0f} parameters ({spread}); {share}.")
    print(f"Outputs differ by {report.difference:.1e} of the largest at most ({report.allowed:.0e} is allowed).")


def _check_place(out: Path, *, overwrite: bool) -> None:
    """An error if nothing can be, or should be, written there; better now than after the work."""
    if (out / "recipe.toml").exists():
        raise ConfigError(f"{out} is the folder of a run; choose another place by --out.")
    if (out / PRUNING).exists():  # a process has begun to write here, and was killed or failed
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / "maskconnect.json").exists():
            raise ConfigError(f"{out} exists and holds something else; choose another place by --out.")
        if not overwrite:
            raise ConfigError(f"{out} exists; choose another place by --out, or replace what is in it by --overwrite.")
    check_writable(out)


def _batches(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"--batches is {shown(text)}; it must be numbers, such as 1,64.")
    return tuple(map(int, words))


def _accuracies(args: argparse.Namespace, frozen: nn.Module, pruned: nn.Module) -> dict[str, dict[str, float]]:
    """The accuracy of both on the test set of the run, if its images are at hand."""
    from maskconnect.training.loading import accuracies
    from maskconnect.training.options import Options

    if not (args.folder / "recipe.toml").exists():
        if args.data is not None:
            raise ConfigError(f"{args.folder} is no run, so nothing says what to test it on; leave --data out.")
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
