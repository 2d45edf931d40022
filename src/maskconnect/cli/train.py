"""`maskconnect train`: train a recipe through all its phases, or resume a run that was stopped."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli import launch
from maskconnect.cli.verb import add_verb, say
from maskconnect.errors import ConfigError, printable
from maskconnect.reading import read_json

if TYPE_CHECKING:
    from maskconnect.recipes import Recipe
    from maskconnect.training.options import Options

EXAMPLES = """train quick/digits
  maskconnect train quick/cifar10 --data data --set model.fan_in=3 --set phase.learn.epochs=20
  maskconnect train quick/digits --wiring runs/quick-digits-seed0/wiring.json --out runs/retrained
  maskconnect train paper/cifar100-resnext29-8-8-learned-k4 --data data --nproc 8

Running the same command again resumes a stopped run, and prints the results of a finished one.
A folder that holds a run of another recipe is an error, never overwritten."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `train` to the command line."""
    parser = add_verb(commands, "train", run, "train a recipe, or resume a run that was stopped", EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe name (see: maskconnect recipes) or a TOML file")
    what = parser.add_argument_group("what to train")
    what.add_argument("--seed", type=int, metavar="N", help="the seed of all random numbers (default: 0)")
    what.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of the recipe, such as model.fan_in=4; repeatable",
    )
    what.add_argument("--init-from", type=Path, metavar="RUN", help="start from the weights of a run or saved network")
    what.add_argument("--wiring", type=Path, metavar="FILE", help="train a fixed wiring: the wiring.json of a run")
    files = parser.add_argument_group("files")
    files.add_argument("--data", type=Path, metavar="DIR", help="the folder of the data set (default: data)")
    files.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: runs/RECIPE-seedN)")
    files.add_argument("--fresh", action="store_true", help="start over, in a new folder next to the old one")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to run, and change no result (up to rounding)."""
    how = parser.add_argument_group("how to run")
    how.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)"
    )
    how.add_argument("--precision", default="fp32", metavar="NAME", help="fp32, bf16, fp16 or fp64 (default: fp32)")
    how.add_argument("--channels-last", action="store_true", help="use the channels-last memory format")
    how.add_argument("--compile", action="store_true", help="use torch.compile once the wiring is fixed")
    how.add_argument("--lean", action="store_true", help="ResNeXt: use less memory and more time")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    how.add_argument("--deterministic", action="store_true", help="use deterministic algorithms only")
    how.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that decode image files (default: 0)"
    )
    how.add_argument(
        "--checkpoint-every",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time between checkpoints (default: 300)",
    )
    how.add_argument(
        "--log-every", type=int, default=50, metavar="STEPS", help="steps between lines of metrics (default: 50)"
    )
    how.add_argument("--nproc", type=int, metavar="N", help="train with N processes, one per GPU or group of cores")
    how.add_argument(
        "--norm",
        default="recipe",
        metavar="NAME",
        help="batch norm with several processes: local, sync or recipe (default: recipe, equal to one process)",
    )
    how.add_argument("--skip-nonfinite", action="store_true", help="skip batches whose loss is not finite")


def run(args: argparse.Namespace) -> int:
    """Train, and print the results."""
    recipe, how = recipe_of(args), options_of(args)
    out = folder_of(recipe, args.out, fresh=args.fresh)
    if args.nproc is not None:
        return launch.launch(args.nproc, launch.words_of(args, out, option_words(how)))
    summary, code = train_and_show(recipe, out, how)
    if summary is not None and is_first():
        from maskconnect.cli.table import show_summary

        show_summary(summary, recipe, out)
        if recipe.model.shape.module_kinds:
            from maskconnect.cli.architecture import show_architecture

            show_architecture(out)
    return code


def train_and_show(recipe: Recipe, out: Path, how: Options) -> tuple[dict[str, Any] | None, int]:
    """Train and show progress; return the summary and 0, or None and the exit code if the run was stopped."""
    from maskconnect.training.folder import RunFolder
    from maskconnect.training.progress import Silent, usual
    from maskconnect.training.run import train
    from maskconnect.training.stop import Stopped

    if not is_first():
        try:
            return train(recipe, out, how, Silent()), 0
        except Stopped as stopped:
            launch.stopped_together = True
            return None, stopped.exit_code
    folder = RunFolder(out)
    if folder.finished and not folder.holds_other(recipe):  # otherwise the error will say so
        say(f"{recipe.name}, seed {recipe.seed}: this run has already finished; it is in {out}")
    try:
        return train(recipe, out, how, usual()), 0
    except Stopped as stopped:
        launch.stopped_together = True
        say(f"stopped by {stopped}; progress is saved. To resume: {resume_command(out, how)}")
        return None, stopped.exit_code


def is_first() -> bool:
    """Return whether this process prints: rank 0, or the only one."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def resume_command(out: Path, how: Options) -> str:
    """Return the command that resumes a run with the same options."""
    from maskconnect.training.folder import RunFolder

    ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != here:
        return "the same command on each machine"
    processes = ["--nproc", ranks] if ranks != "1" else []
    return shlex.join([program(), *shlex.split(RunFolder(out).command())[1:], *option_words(how), *processes])


def option_words(how: Options) -> list[str]:
    """Return the options that differ from their defaults, as they are typed."""
    from dataclasses import fields

    words: list[str] = []
    for field in fields(how):
        value, flag = getattr(how, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default:
            joined = str(value).startswith("-")  # otherwise argparse would read the value as an option
            words += [flag] if value is True else [f"{flag}={value}"] if joined else [flag, str(value)]
    return words


def program() -> str:
    """Return what to type for this program: its name, or its path if the shell would not find it."""
    typed = Path(sys.argv[0])
    return str(typed) if typed.name == "maskconnect" and shutil.which("maskconnect") is None else "maskconnect"


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Load the recipe and apply the command line to it."""
    from maskconnect.recipes import load

    recipe = load(args.recipe, args.settings)
    if args.seed is not None:
        recipe = replace(recipe, seed=args.seed)
    if args.init_from is not None:
        recipe = replace(recipe, init_from=str(args.init_from))
    if args.wiring is not None:
        about = f"{recipe.about}; changed: the wiring of {printable(str(args.wiring))}"
        model = replace(recipe.model, connectivity=read_wiring(args.wiring))
        recipe = replace(recipe, about=about, paper=None, model=model)
    return recipe


def read_wiring(path: Path) -> Any:
    """Read a wiring as plain data."""
    try:
        found = read_json(path)
    except OSError as error:
        raise ConfigError(f"--wiring {path} cannot be read: {error.strerror}; pass a run's wiring.json.") from None
    except ValueError:
        raise ConfigError(f"--wiring {path} is not valid JSON; pass a run's wiring.json.") from None
    if not isinstance(found, list):
        raise ConfigError(f"--wiring {path} does not hold a list; pass a run's wiring.json.")
    return found


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of `add_options`."""
    from dataclasses import fields

    from maskconnect.training.options import Options

    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def folder_of(recipe: Recipe, out: Path | None, *, fresh: bool) -> Path:
    """Return the run folder: `out`, or runs/NAME-seedN; with `fresh`, the first numbered one that does not exist."""
    place = out or Path("runs") / f"{recipe.name.replace('/', '-')}-seed{recipe.seed}"
    if fresh and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--fresh does not work with torchrun, because each process would choose its own folder; "
            "name a new folder with --out."
        )
    if not fresh or not place.exists():
        return place
    place, number = place.resolve(), 2
    if not place.name:
        raise ConfigError(f"--out is {place}; name a folder inside it.")
    while (new := place.with_name(f"{place.name}-{number}")).exists():
        number += 1
    return new
