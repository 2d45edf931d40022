"""`maskconnect reproduce`: a table or a figure of the paper, with our numbers next to the paper's."""

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
from maskconnect.cli.untrained import show_architectures, show_overhead
from maskconnect.cli.verb import add_verb
from maskconnect.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from maskconnect.experiments.grid import Cell
    from maskconnect.experiments.paper import Experiment
    from maskconnect.experiments.sweep import Outcome

EXAMPLES = """reproduce                                              list all experiments
  maskconnect reproduce table1 --scale quick --data data --jobs 2    at a size for two cores
  maskconnect reproduce table1 --data data                           the experiment of the paper
  maskconnect reproduce table1 --keep kept --show-only               print existing results

Running the same command again resumes: finished runs are not repeated."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `reproduce` to the command line."""
    about = "reproduce a table or figure of the paper: train what is missing, and print our numbers next to the paper's"
    parser = add_verb(commands, "reproduce", run, about, EXAMPLES)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="table1 to table7, resnet50, fig2 to fig6, or overhead; without NAME, list them",
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--scale", default="paper", metavar="NAME", help="paper or quick (default: paper)")
    what.add_argument("--seeds", metavar="N", help="the first N seeds, or which: 2..5 (default: as many as the paper)")
    what.add_argument(
        "--controls",
        default="",
        metavar="NAMES",
        help="add controls: random,retrained,shuffled,draws,sum (see docs/reproduction.md)",
    )
    what.add_argument("--show-only", action="store_true", help="train nothing; print the results that exist")
    files = parser.add_argument_group("files")
    files.add_argument("--data", type=Path, metavar="DIR", help="the folder of the data set (default: data)")
    files.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder for runs and tables (default: runs/reproduce/NAME-SCALE)"
    )
    files.add_argument(
        "--results", type=Path, metavar="FILE", help="also write the table to its section of this Markdown file"
    )
    add_keep(files)
    add_engine(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Reproduce a table or figure, or list all of them."""
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
            raise ConfigError(f"{args.name} trains nothing, so {wrong} is not used; leave it out.")
        show_architectures(args.name) if args.name in NETWORKS else show_overhead(args, command())
        return 0
    if args.name not in EXPERIMENTS:
        raise unknown_name("the name", args.name, [*EXPERIMENTS, "overhead", *NETWORKS])
    return reproduce(EXPERIMENTS[args.name], args)


def show_list() -> None:
    """Print all tables and figures, with their cost."""
    from maskconnect.cli.table import show_table
    from maskconnect.experiments.architectures import NETWORKS
    from maskconnect.experiments.paper import EXPERIMENTS

    rows = [(e.name, e.title_at("paper"), cost(e, "paper"), cost(e, "quick")) for e in EXPERIMENTS.values()]
    rows.append(("overhead", "time of a learning step over one of fixed wiring", "about 8 minutes", "about 2 minutes"))
    titles = {"table6": "ResNeXt for CIFAR, layer by layer", "table7": "ResNeXt for Mini-ImageNet, layer by layer"}
    rows += [(name, titles[name], "nothing", "") for name in NETWORKS]
    show_table(("name", "what it is", "--scale paper", "--scale quick"), rows)


def cost(experiment: Experiment, scale: str) -> str:
    """Say how many runs of how many epochs an experiment takes."""
    from maskconnect.experiments.paper import recipes_of

    recipes = recipes_of(experiment, scale)
    epochs = sorted({recipe.epochs for recipe in recipes})
    runs = len(recipes) * experiment.seeds
    return f"{runs} run{'s' * (runs > 1)} of {' to '.join(map(str, epochs))} epochs" if recipes else ""


def reproduce(experiment: Experiment, args: argparse.Namespace) -> int:
    """Run what is missing, and print the table or draw the figure; return 1 if a run failed."""
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
        raise ConfigError(
            f"{experiment.name} has no quick scale, because its data set is too large; use --scale paper."
        )
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
        print(f"stopped by {stopped}; progress is saved. Run the same command again to resume.", flush=True)
        return stopped.exit_code
    place = {row.name: number for number, row in enumerate(rows)}
    outcomes.sort(key=lambda outcome: place[outcome.cell.values[0]])
    show_result(experiment, outcomes, out, args)
    return 1 if not args.show_only and any(outcome.summary is None for outcome in outcomes) else 0


def command() -> str:
    """Return the command line as it was typed."""
    return shlex.join(["maskconnect", *sys.argv[1:]])


def show_result(experiment: Experiment, outcomes: Sequence[Outcome], out: Path, args: argparse.Namespace) -> None:
    """Print the table, write it to files, and draw the figure if the experiment is one."""
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
        print(f"The table is in {args.results}.")
    elif args.results is not None:
        print(f"The table was not written to {args.results}, because some runs have no result.")


def draw(experiment: Experiment, folders: Sequence[Path], out: Path, scale: str) -> list[str]:
    """Draw the figure if the experiment is one, and return the names of its files."""
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
