"""`maskconnect reproduce`: a table or a figure of the paper, our numbers beside its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.sweep import add_engine, add_keep, engine_of
from maskconnect.cli.train import add_options, program
from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from maskconnect.experiments.grid import Cell
    from maskconnect.experiments.paper import Experiment
    from maskconnect.experiments.sweep import Outcome

EXAMPLE = """reproduce                                              what there is, and what it costs
  maskconnect reproduce table1 --scale quick --data data --jobs 2    at a size for two cores
  maskconnect reproduce table1 --data data                           the paper's own experiment
  maskconnect reproduce table1 --keep kept --show-only               train nothing: the table of what is kept
  maskconnect reproduce table6                                       architectures, as they are built

The same command again goes on: runs that have ended are not run again."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `reproduce` to the command line."""
    about = "a table or figure of the paper: run what is missing, show our numbers beside the paper's"
    parser = add_verb(commands, "reproduce", run, about, EXAMPLE)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="table1 to table7, resnet50, fig2 to fig6, overhead; none: a list"
    )
    parser.add_argument("--scale", default="paper", metavar="NAME", help="paper (the default) or quick")
    parser.add_argument("--seeds", metavar="N", help="how many, from 0 on, or which: 2..5 (default: as in the paper)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder that the data set is in (default: data)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for runs and tables (default: runs/reproduce/NAME-SCALE)"
    )
    parser.add_argument(
        "--controls",
        default="",
        metavar="NAMES",
        help="also random, retrained, shuffled, draws, sum; see docs/claims.md",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="also keep the table in this Markdown file")
    parser.add_argument(
        "--show-only", action="store_true", help="train nothing: show what is kept or has ended, with gaps"
    )
    add_keep(parser)
    add_engine(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Reproduce, or list."""
    from maskconnect.experiments.architectures import NETWORKS
    from maskconnect.experiments.paper import EXPERIMENTS, SCALES

    if args.scale not in SCALES:
        raise unknown_name("--scale", args.scale, SCALES)
    if args.name is None:
        show_list()
        return 0
    if args.name in (*NETWORKS, "overhead"):
        given = {"--engine": args.engine != "local", "--slurm": args.slurm, "--jobs": args.jobs, "--seeds": args.seeds}
        given |= {
            "--controls": args.controls,
            "--show-only": args.show_only,
            "--results": args.name in NETWORKS and args.results,
        }
        if wrong := next((option for option, there in given.items() if there), None):
            raise ConfigError(f"{wrong} is for experiments that train; {args.name} is none.")
        show_architectures(args.name) if args.name in NETWORKS else show_overhead(args)
        return 0
    if args.name not in EXPERIMENTS:
        raise unknown_name("the name", args.name, [*EXPERIMENTS, "overhead", *NETWORKS])
    return reproduce(EXPERIMENTS[args.name], args)


def show_list() -> None:
    """What there is, and what it costs."""
    from maskconnect.cli.table import show_table
    from maskconnect.experiments.architectures import NETWORKS
    from maskconnect.experiments.paper import EXPERIMENTS

    rows = [(e.name, e.title_at("paper"), cost(e, "paper"), cost(e, "quick")) for e in EXPERIMENTS.values()]
    rows.append(("overhead", "a learning step over one of fixed wiring", "about 8 minutes", "about 2 minutes"))
    titles = {"table6": "ResNeXt for CIFAR, layer by layer", "table7": "ResNeXt for Mini-ImageNet, layer by layer"}
    rows += [(name, titles[name], "nothing", "") for name in NETWORKS]
    show_table(("name", "what it is", "--scale paper", "--scale quick"), rows)


def cost(experiment: Experiment, scale: str) -> str:
    """How many runs of how many epochs."""
    from maskconnect.experiments.paper import recipes_of

    recipes = recipes_of(experiment, scale)
    epochs = sorted({recipe.epochs for recipe in recipes})
    runs = len(recipes) * experiment.seeds
    return f"{runs} run{'s' * (runs > 1)} of {' to '.join(map(str, epochs))} epochs" if recipes else ""


OVERHEAD = {"resnet38": 1.13, "resnext29-8-8": 1.39}
"""What the paper reports for ResNet and ResNeXt, over its own fixed wiring."""


def show_overhead(args: argparse.Namespace) -> None:
    """Time learning steps and steps of fixed wiring, in turn."""
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
    head = ("network", "batch", "ours, median", "of rounds", "paper")
    note = "A training step that learns masks over one of fixed random wiring, interleaved, on the CPU of this machine."
    show_table(head, rows, right=(1, 2, 3, 4))
    print(f"\n{note}")
    if args.results is not None:
        table = Table("overhead: what learning costs", head, tuple(rows), (note,))
        record(args.results, "overhead", args.scale, table, provenance_here(command(), Options(threads=args.threads)))
        print(f"Kept in {args.results}.")


def command() -> str:
    """What was typed."""
    return shlex.join(["maskconnect", *sys.argv[1:]])


def show_architectures(name: str) -> None:
    """Tables 6 and 7."""
    from maskconnect.experiments.architectures import NETWORKS, architecture

    stem, networks = NETWORKS[name]
    for number, (depth, width, cardinality) in enumerate(networks):
        print("\n" * bool(number) + f"{{D={depth}, w={width}, C={cardinality}}}")
        for line in architecture(stem, depth, width, cardinality):
            print(f"  {line}")


def reproduce(experiment: Experiment, args: argparse.Namespace) -> int:
    """Run what is missing, show the table or draw the figure; 1 if some runs failed."""
    from maskconnect.experiments.controls import controls_of, wired_cells, with_controls
    from maskconnect.experiments.grid import seeds_of
    from maskconnect.experiments.kept import Kept
    from maskconnect.experiments.record import check_place
    from maskconnect.experiments.sweep import found_cells, run_cells
    from maskconnect.training.progress import usual
    from maskconnect.training.stop import Stopped

    if args.results is not None:
        check_place(args.results)
    if not experiment.rows(args.scale):
        raise ConfigError(f"{experiment.name} has no quick form: its data set is too large. Take --scale paper.")
    seeds = range(experiment.seeds) if args.seeds is None else seeds_of(args.seeds)
    rows = with_controls(experiment.rows(args.scale), controls_of(args.controls))
    cells = [row.cell(seed) for row in rows if not row.needs_wiring for seed in seeds]
    engine = engine_of(args, len(cells))
    out = args.out or Path("runs/reproduce") / f"{experiment.name}-{args.scale}"
    print(f"{experiment.title_at(args.scale)}, {args.scale} scale", flush=True)
    ours = {"experiment": experiment.name, "scale": args.scale}
    kept = None if args.keep is None else Kept(args.keep)

    def find(cells: Sequence[Cell]) -> list[Outcome]:
        if args.show_only:
            return found_cells(cells, out, kept)
        return run_cells(cells, out, ours, engine=engine, show=usual(), kept=kept)

    try:
        outcomes = find(cells)
        more, gaps = wired_cells(rows, outcomes, out, write=not args.show_only)
        outcomes += gaps
        if more:
            outcomes += find(more)
    except Stopped as stopped:
        print(f"stopped by {stopped}; all is saved. The same command again goes on.", flush=True)
        return stopped.exit_code
    place = {row.name: number for number, row in enumerate(rows)}
    outcomes.sort(key=lambda outcome: place[outcome.cell.values[0]])
    show_result(experiment, outcomes, out, args)
    return 1 if not args.show_only and any(outcome.summary is None for outcome in outcomes) else 0


def show_result(experiment: Experiment, outcomes: Sequence[Outcome], out: Path, args: argparse.Namespace) -> None:
    """The table, as text and files; for a figure, that too."""
    from maskconnect.cli.table import show_table
    from maskconnect.experiments.layout import table_of
    from maskconnect.experiments.record import provenance, record
    from maskconnect.training.files import write_atomically

    title, compared = f"{experiment.name}: {experiment.title_at(args.scale)}", experiment.shows == "table"
    table = table_of(title, outcomes, scale=args.scale, compared=compared)
    lines = provenance(outcomes, command())
    kept = "\n".join([table.markdown(), *(f"- {line}" for line in lines), ""])
    print()
    show_table(table.head, table.rows, right=range(2, 7))
    print("\n" + "\n".join(table.notes))
    if not args.show_only:
        written = {
            f"{experiment.name}.md": kept,
            f"{experiment.name}.csv": table.csv(),
            f"{experiment.name}.tex": table.latex(),
        }
        for name, text in written.items():
            write_atomically(out / name, text)
        folders = [outcome.folder for outcome in outcomes if outcome.summary is not None and outcome.folder.is_dir()]
        figures = draw(experiment, folders, out, args.scale)
        print(f"\nIn {out}: {', '.join([*written, *figures])}. To look at the runs:")
        print(f"  {program()} report {shlex.quote(str(out))} --out report")
    whole = all(outcome.summary is not None for outcome in outcomes)
    if args.results is not None and (whole or args.show_only):
        record(args.results, experiment.name, args.scale, table, lines)
        print(f"Kept in {args.results}.")
    elif args.results is not None:
        print(f"Not kept in {args.results}, because some runs have no result.")


def draw(experiment: Experiment, folders: Sequence[Path], out: Path, scale: str) -> list[str]:
    """The figure, if the experiment is one; returns the names of its files."""
    from maskconnect.recipes.naming import data_names
    from maskconnect.report import charts, figures
    from maskconnect.report.drawing import write
    from maskconnect.report.groups import groups_of
    from maskconnect.report.runs import read_run
    from maskconnect.report.write import drawing_of

    if experiment.shows == "table" or not folders:
        return []
    runs = [read_run(folder) for folder in folders]
    if experiment.shows == "wiring":
        names = [f"{experiment.name}.{kind}" for kind in ("svg", "png")]
        for name in names:
            write(drawing_of(runs[0]), out / name)
        return names
    chart = {"fan-in": charts.fan_in, "branching": charts.branching}[experiment.shows](groups_of(runs))
    if chart is None:
        return []
    if scale == "quick":
        chart = replace(chart, title=f"{chart.title}, {data_names(run.recipe for run in runs)} (quick scale)")
    return [path.name for path in figures.write_chart(chart, out / experiment.name)]
