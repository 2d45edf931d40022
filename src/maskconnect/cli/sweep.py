"""`maskconnect sweep`: one recipe over several values of its fields, and several seeds."""

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
EXAMPLE = """sweep quick/digits --fan-in 1..8 --seeds 3
  maskconnect sweep paper/cifar100-resnet38-learned --fan-in 1..17 --seeds 4 --data data --jobs 2
  maskconnect sweep quick/digits --over phase.learn.mask_lr=0.1,0.3,1 --over model.fan_in=2,4 --seeds 0,7
  maskconnect sweep quick/digits --seeds 30 --keep results      small files to commit; another sitting goes on from them
  maskconnect sweep quick/digits --seeds 8 --engine slurm --slurm partition=cpu --slurm cpus-per-task=4

The same command again goes on: runs that have ended are not run again. More seeds or values may be added."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `sweep` to the command line."""
    about = "train a recipe over several values of its fields, and several seeds"
    parser = add_verb(commands, "sweep", run, about, EXAMPLE)
    parser.add_argument("recipe", metavar="RECIPE", help="a name (see: maskconnect recipes) or a TOML file")
    what = parser.add_argument_group("what to train")
    what.add_argument("--fan-in", metavar="VALUES", help="values of model.fan_in, such as 1..17 or 1,4,8")
    what.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=VALUES",
        help="any field of the recipe, such as phase.learn.mask_lr=0.1,0.3; may be given again",
    )
    what.add_argument("--seeds", default="1", metavar="N", help="how many, from 0 on, or which: 2..5 (default: 1)")
    what.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE", help="the same in all runs"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--data", type=Path, metavar="DIR", help="the folder that the data set is in (default: data)")
    where.add_argument("--out", type=Path, metavar="DIR", help="a folder for all runs (default: runs/RECIPE-sweep)")
    add_keep(where)
    add_engine(parser)
    add_options(parser)


def add_keep(group: argparse._ActionsContainer) -> None:
    """Add the place for results that outlive their folders."""
    group.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep each result as a small JSON file there; a run whose result is kept counts as done",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the choices of who runs the runs."""
    who = parser.add_argument_group("who runs them")
    who.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: 1; of SLURM: what it allows)")
    who.add_argument(
        "--engine", default="local", metavar="NAME", help="local (the default), or slurm: an array job of a cluster"
    )
    who.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of sbatch, such as partition=gpu, time=4:00:00 or gpus-per-node=1; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    """Run the grid, and show what came of it; 1 if some cells failed."""
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
        print(f"stopped by {stopped}; all is saved. The same command again goes on.", flush=True)
        return stopped.exit_code
    from maskconnect.cli.table import show_table

    head, rows = table(grid, outcomes)
    print()
    show_table(head, rows, right=range(len(grid.over), len(head)))
    print(f"\nEvery run is in {out}, its numbers in {write_results(grid, outcomes, out)}. Next:")
    print(f"  {program()} report {shlex.quote(str(out))} --out report")
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        say(f"FAILED {outcome.cell.name}: {outcome.why}")
    return 1 if failed else 0


def engine_of(args: argparse.Namespace, cells: int) -> Engine:
    """Who runs the runs; several at a time on this machine share the cores, unless --threads says otherwise."""
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
        raise ConfigError("--slurm goes with --engine slurm.")
    jobs, processes = args.jobs or 1, args.nproc or 1
    if (share := min(jobs, cells) * processes) > 1 and args.threads is None:
        words += ["--threads", str(max(1, (os.cpu_count() or 1) // share))]
    return Local(jobs, words)
