"""`maskconnect sweep`: train one recipe over several values of its fields and several seeds."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.launch import check as check_processes
from maskconnect.cli.train import add_options, option_words, options_of, program
from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from maskconnect.experiments.engine import Engine

ENGINES = ("local", "slurm")
EXAMPLES = """sweep quick/digits --fan-in 1..8 --seeds 3
  maskconnect sweep quick/digits --over phase.learn.mask_lr=0.1,0.3 --over model.fan_in=2,4
  maskconnect sweep quick/digits --seeds 30 --keep results    also write a small file per run
  maskconnect sweep quick/digits --engine slurm --slurm partition=gpu --slurm time=4:00:00

Running the same command again resumes: finished runs are not repeated. You can add seeds or values.
A folder that holds another sweep is an error, never overwritten."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `sweep` to the command line."""
    about = "train a recipe over several values of its fields and several seeds"
    parser = add_verb(commands, "sweep", run, about, EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe name (see: maskconnect recipes) or a TOML file")
    what = parser.add_argument_group("what to train")
    what.add_argument("--fan-in", metavar="VALUES", help="values of model.fan_in, such as 1..17 or 1,4,8")
    what.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=VALUES",
        help="values of any field, such as phase.learn.mask_lr=0.1,0.3; repeatable",
    )
    what.add_argument("--seeds", default="1", metavar="N", help="the first N seeds, or which: 2..5 or 0,7 (default: 1)")
    what.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE", help="set a field in all runs"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--data", type=Path, metavar="DIR", help="the folder of the data set (default: data)")
    files.add_argument("--out", type=Path, metavar="DIR", help="the folder for all runs (default: runs/RECIPE-sweep)")
    add_keep(files)
    add_engine(parser)
    add_options(parser)


def add_keep(group: argparse._ActionsContainer) -> None:
    """Add the option for result files that outlive their run folders."""
    group.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="also write each result to a small JSON file there; runs with such a file count as finished",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the runs are executed."""
    where = parser.add_argument_group("where to run")
    where.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: 1; with SLURM: no limit)")
    where.add_argument(
        "--engine",
        default="local",
        metavar="NAME",
        help="local, or slurm for an array job on a cluster (default: local)",
    )
    where.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an sbatch option, such as partition=gpu, time=4:00:00 or gpus-per-node=1; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Run the grid and print the results; return 1 if a run failed."""
    from maskconnect.experiments.grid import Grid, field_and_values, seeds_of, values_of
    from maskconnect.experiments.kept import Kept
    from maskconnect.experiments.results import table, write_results
    from maskconnect.experiments.sweep import sweep
    from maskconnect.training.progress import usual
    from maskconnect.training.stop import Stopped

    over = [] if args.fan_in is None else [("model.fan_in", values_of(args.fan_in, "--fan-in"))]
    over += map(field_and_values, args.over)
    grid = Grid(recipe=args.recipe, settings=tuple(args.settings), over=tuple(over), seeds=seeds_of(args.seeds))
    cells = grid.cells()
    out = args.out or Path("runs") / f"{cells[0].recipe.name.replace('/', '-')}-sweep"
    kept = None if args.keep is None else Kept(args.keep)
    try:
        outcomes = sweep(grid, out, engine=engine_of(args, len(cells)), show=usual(), kept=kept)
    except Stopped as stopped:
        print(f"stopped by {stopped}; progress is saved. Run the same command again to resume.", flush=True)
        return stopped.exit_code
    from maskconnect.cli.table import show_table

    head, rows = table(grid, outcomes)
    print()
    show_table(head, rows, right=range(len(grid.over), len(head)))
    print(f"\nThe runs are in {out}, their numbers in {write_results(grid, outcomes, out)}. Next:")
    print(f"  {program()} report {shlex.quote(str(out))} --out report")
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        say(f"FAILED {outcome.cell.name}: {outcome.why}")
    return 1 if failed else 0


def engine_of(args: argparse.Namespace, cells: int) -> Engine:
    """Return the engine. Concurrent runs on this machine divide its cores, unless --threads is given."""
    from maskconnect.experiments.engine import Local
    from maskconnect.experiments.slurm import Slurm, settings_of

    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be 1 or more.")
    if args.engine not in ENGINES:
        raise unknown_name("--engine", args.engine, ENGINES)
    words = option_words(options_of(args))
    if args.nproc is not None:
        check_processes(args.nproc)
        words += ["--nproc", str(args.nproc)]
    if args.engine == "slurm":
        return Slurm(args.jobs, words, settings_of(args.slurm))
    if args.slurm:
        raise ConfigError("--slurm needs --engine slurm; add it, or leave --slurm out.")
    jobs, processes = args.jobs or 1, args.nproc or 1
    if (share := min(jobs, cells) * processes) > 1 and args.threads is None:
        words += ["--threads", str(max(1, (os.cpu_count() or 1) // share))]
    return Local(jobs, words)
