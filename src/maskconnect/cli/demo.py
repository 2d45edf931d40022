"""`maskconnect demo`: the main job in about two minutes: learned wiring beside fixed wiring, then pruned."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskconnect.cli import train
from maskconnect.cli.table import show_table

RUNS = {
    "quick/digits-prev": "Fixed-Prev",
    "quick/digits-random": "Fixed-Random",
    "quick/digits": "Learned",
}


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `demo` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="learn a wiring on digits, beside fixed ones (about two minutes)",
        description="Train a network on handwritten digits three times, with fixed, random and learned wiring, then "
        "prune the learned one. Takes about two minutes on two cores, and needs no data but scikit-learn's.",
        epilog="example:\n  maskconnect demo --seed 1",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all three (default: 0)")
    parser.add_argument("--fresh", action="store_true", help="begin anew, in new folders beside the old ones")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the CPU (default: 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train three times, compare, prune."""
    from maskconnect.recipes import load
    from maskconnect.training.options import Options

    how = Options(threads=args.threads)
    print("One network of 9 residual blocks, three wirings, the same epochs, rates and seed. 1,797 digits of 8x8.")
    summaries: list[dict[str, Any]] = []
    folders: list[Path] = []
    for number, name in enumerate(RUNS, start=1):
        recipe = replace(load(name), seed=args.seed)
        out = train.folder_of(recipe, args.out / f"{Path(name).name}-seed{args.seed}", fresh=args.fresh)
        print(f"\n[{number}/{len(RUNS)}] ", end="")
        summary, code = train.train_and_show(recipe, out, how)
        if summary is None:
            print("Or the same demo again, without --fresh: it goes on with this run, and shows those that have ended.")
            return code
        summaries.append(summary)
        folders.append(out)
    print()
    show_comparison(summaries)
    prune_and_show(folders[-1], how)
    print("\nThe runs are in:")
    for folder in folders:
        print(f"  {folder}")
    print("\nNext:")
    look, last = shlex.join(map(str, folders)), shlex.quote(str(folders[-1]))
    for words in (
        f"report {look} --out report",
        f"prune {last} --out slim",
        f"evaluate {last}",
        "recipes",
        "train --help",
    ):
        print(f"  {train.program()} {words}")
    return 0


def show_comparison(summaries: list[dict[str, Any]]) -> None:
    """The table."""
    from maskconnect.training.progress import duration

    head = ("wiring", "test accuracy", "parameters", "after pruning", "time")
    rows = []
    for kind, summary in zip(RUNS.values(), summaries, strict=True):
        fan_in = f", K={summary['fan_in']}" if summary["connectivity"] != "prev" else ", K=1"
        numbers = [f"{summary['parameters'][key]:,}" for key in ("weights", "pruned")]
        accuracy = f"{summary['test']['top1']:.2f} %"
        rows.append((kind + fan_in, accuracy, *numbers, duration(summary["seconds"])))
    show_table(head, rows, right=range(1, len(head)))
    print("\nAccuracy is that of the last epoch, on 360 test images: one of them is 0.28 %. One run each of so small a")
    print("task shows how it works, and not which wiring is better.")


def prune_and_show(folder: Path, how: Any) -> None:
    """Prune the learned network, and compare what it computes with what it did."""
    from maskconnect.core.lookup import masks_of, wiring_of
    from maskconnect.pruning.prune import difference, prune, pruned_parameters
    from maskconnect.training.loading import load_run

    network, images, _ = load_run(folder, how)
    x, _ = next(iter(images.test.epoch(0)))
    slim = prune(network, x, merge=False)
    wiring, counts = wiring_of(network), pruned_parameters(network)
    kept = sum(on for masks in masks_of(network) for on in masks.settled().alive)
    print("\nThe learned wiring:")
    for block, sources in enumerate(wiring):
        reads = "the stem" if not sources else " and ".join(map(str, sources))
        print(f"  block {block} reads {reads}")
    apart = max(difference(network, slim, x) for x, _ in images.test.epoch(0))
    same = "is 0: they are equal to the bit" if not apart else f"is {apart:.1e} of the largest output"
    print(
        f"\nPruned: {len(wiring)} blocks become {kept}, {counts.weights:,} parameters become {counts.transitive:,}.\n"
        f"The largest difference of outputs, over all test images, {same}."
    )
