"""`maskconnect train`: a recipe through all its phases, or on from where it was stopped."""

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
from maskconnect.cli.verb import say
from maskconnect.errors import ConfigError, printable
from maskconnect.reading import read_json

if TYPE_CHECKING:
    from maskconnect.recipes import Recipe
    from maskconnect.training.options import Options

EXAMPLES = """\
examples:
  maskconnect train quick/digits
  maskconnect train paper/cifar100-resnet38-learned --data data --seed 1
  maskconnect train quick/cifar10 --data data --set model.fan_in=3 --set phase.learn.epochs=20
  maskconnect train quick/digits --set training.reestimate=20 --set training.accumulate=2 --out runs/other
  maskconnect train quick/digits --wiring runs/quick-digits-seed0/wiring.json --out runs/again
  maskconnect train paper/cifar100-resnext29-8-8-learned-k4 --data data --nproc 8

The same command again goes on with a run that was stopped; a run that has ended is shown."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `train` to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a recipe, or go on with a run",
        description="Train a recipe, or go on with a run.",
        epilog=EXAMPLES,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a name (see: maskconnect recipes) or a TOML file")
    what = parser.add_argument_group("what to train")
    what.add_argument("--seed", type=int, metavar="N", help="of weights, draws, order and augmentation (default: 0)")
    what.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of the recipe, such as model.fan_in=4; may be given again",
    )
    what.add_argument("--init-from", type=Path, metavar="RUN", help="start from the trained weights of a run or folder")
    what.add_argument("--wiring", type=Path, metavar="FILE", help="train a given wiring: the wiring.json of a run")
    where = parser.add_argument_group("where")
    where.add_argument("--data", type=Path, metavar="DIR", help="the folder that the data set is in (default: data)")
    where.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: runs/RECIPE-seedN)")
    where.add_argument("--fresh", action="store_true", help="begin anew, in a new folder beside the old one")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choices of how to run."""
    how = parser.add_argument_group("how")
    how.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if any)")
    how.add_argument("--precision", default="fp32", metavar="NAME", help="fp32, bf16, fp16 or fp64 (default: fp32)")
    how.add_argument("--channels-last", action="store_true", help="keep images and weights channels-last in memory")
    how.add_argument("--compile", action="store_true", help="torch.compile the network, once its wiring is fixed")
    how.add_argument("--lean", action="store_true", help="ResNeXt in less memory, for some more time")
    how.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    how.add_argument("--deterministic", action="store_true", help="only algorithms that always give the same bits")
    how.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode image files")
    how.add_argument(
        "--checkpoint-every", type=float, default=300.0, metavar="SECONDS", help="between checkpoints (default: 300)"
    )
    how.add_argument(
        "--log-every", type=int, default=50, metavar="STEPS", help="between lines of metrics (default: 50)"
    )
    how.add_argument("--nproc", type=int, metavar="N", help="train with N processes of this machine: GPUs, or cores")
    how.add_argument(
        "--norm",
        default="recipe",
        metavar="NAME",
        help="batch norm on several ranks: local, sync, or (the default) what gives the result of one rank",
    )
    how.add_argument("--skip-nonfinite", action="store_true", help="leave a batch out whose loss is not finite")


def run(args: argparse.Namespace) -> int:
    """Train, and show what came of it."""
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
    """Train with progress; the summary, or None and the exit code where the run was stopped."""
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
    folder, name = RunFolder(out), f"{recipe.name}, seed {recipe.seed}"
    if folder.holds_other(recipe):
        pass  # which the error will say
    elif folder.finished:
        say(f"{name}: this run has ended before; it is in {out}")
    else:
        say(f"{name}, in {out}")
    try:
        return train(recipe, out, how, usual()), 0
    except Stopped as stopped:
        launch.stopped_together = True
        say(f"stopped by {stopped}; all is saved. To go on: {go_on(out, how)}")
        return None, stopped.exit_code


def is_first() -> bool:
    """Whether this process is the one that prints, of those that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def go_on(out: Path, how: Options) -> str:
    """The command that goes on with a run, with the same options."""
    from maskconnect.training.folder import RunFolder

    ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != here:
        return "the same command on each machine"
    processes = ["--nproc", ranks] if ranks != "1" else []
    return shlex.join([program(), *shlex.split(RunFolder(out).command())[1:], *option_words(how), *processes])


def option_words(how: Options) -> list[str]:
    """The options that are not the usual ones, as they are typed."""
    from dataclasses import fields

    words: list[str] = []
    for field in fields(how):
        value, flag = getattr(how, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default:
            joined = str(value).startswith("-")  # else it would be taken for an option
            words += [flag] if value is True else [f"{flag}={value}"] if joined else [flag, str(value)]
    return words


def program() -> str:
    """What to type for this program: its name, or its path where the shell would not find it."""
    typed = Path(sys.argv[0])
    return str(typed) if typed.name == "maskconnect" and shutil.which("maskconnect") is None else "maskconnect"


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe with everything that the command line says about it."""
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
    """A wiring as plain data."""
    try:
        found = read_json(path)
    except OSError as error:
        raise ConfigError(f"--wiring {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"--wiring {path} is no JSON; needed is the wiring.json of a run.") from None
    if not isinstance(found, list):
        raise ConfigError(f"--wiring {path} holds no list; needed is the wiring.json of a run.")
    return found


def options_of(args: argparse.Namespace) -> Options:
    """How to run."""
    from dataclasses import fields

    from maskconnect.training.options import Options

    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def folder_of(recipe: Recipe, out: Path | None, *, fresh: bool) -> Path:
    """Where the run goes: what was said, or runs/NAME-seedN; with `fresh`, the first such folder that is not there."""
    place = out or Path("runs") / f"{recipe.name.replace('/', '-')}-seed{recipe.seed}"
    if fresh and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--fresh is not for torchrun, each of whose processes would choose a folder; name one by --out."
        )
    if not fresh or not place.exists():
        return place
    place, number = place.resolve(), 2
    if not place.name:
        raise ConfigError(f"--out is {place}; name a folder in it.")
    while (new := place.with_name(f"{place.name}-{number}")).exists():
        number += 1
    return new
