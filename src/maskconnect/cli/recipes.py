"""`maskconnect recipes ...`: list, show and check recipes."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskconnect.cli.table import show_table
from maskconnect.cli.verb import add_verb, say

if TYPE_CHECKING:
    from maskconnect.recipes import Recipe


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `recipes` and its commands to the command line."""
    about = "list, show and check recipes"
    parser = commands.add_parser(
        "recipes",
        help=about,
        description=f"{about.capitalize()}. Without a command, list the recipes that come with maskconnect.",
        epilog="examples:\n  maskconnect recipes\n  maskconnect recipes show quick/digits",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=list_recipes)
    verbs = parser.add_subparsers(metavar="COMMAND", title="commands")

    verb = add_verb(
        verbs,
        "show",
        show,
        "print a recipe with all its fields, as TOML",
        "recipes show quick/digits\n  maskconnect recipes show quick/digits --set phase.learn.epochs=2",
    )
    verb.add_argument("name", metavar="NAME", help="a recipe, a file, or FILE:VARIANT; see: maskconnect recipes")
    verb.add_argument(
        "--set",
        dest="settings",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="set a field, such as model.fan_in=4; repeatable",
    )

    about = "load every recipe of a file, and print a line for each"
    verb = add_verb(verbs, "check", check, about, "recipes check mine.toml\n  maskconnect recipes check quick/digits")
    verb.add_argument("files", metavar="FILE", nargs="+", help="a TOML file, or a recipe name")


def list_recipes(args: argparse.Namespace) -> None:
    """Print the recipes that come with maskconnect, the quick ones first."""
    from maskconnect.recipes import load, names

    recipes = [load(name) for name in names()]
    if args.json:
        print(json.dumps([_summary(recipe) for recipe in recipes], indent=2))
    else:
        head = ("name", "what it is", "epochs", "paper, %", "where")
        show_table(head, [_row(recipe) for recipe in recipes], right=(2, 3))


def show(args: argparse.Namespace) -> None:
    """Print a recipe as TOML, with all its fields."""
    from maskconnect.recipes import load, write

    changes = [word for setting in args.settings for word in ("--set", setting)]
    command = shlex.join(["maskconnect", "train", args.name, *changes])
    print(write(load(args.name, args.settings), command), end="")


def check(args: argparse.Namespace) -> None:
    """Load every recipe in the files and print a line for each."""
    from maskconnect.recipes import load
    from maskconnect.recipes.load import in_file

    for file in args.files:
        for name in in_file(Path(file)) if file.endswith(".toml") else [file]:
            say(f"ok  {name}: {_in_words(load(name))}")


def _summary(recipe: Recipe) -> dict[str, Any]:
    paper = None if recipe.paper is None else asdict(recipe.paper)
    return {
        "name": recipe.name,
        "about": recipe.about,
        "data": recipe.data.name,
        "epochs": recipe.epochs,
        "paper": paper,
    }


def _row(recipe: Recipe) -> tuple[str, ...]:
    paper = recipe.paper
    accuracy = f"{paper.accuracy:.2f}" if paper and paper.accuracy is not None else ""
    return recipe.name, recipe.about, str(recipe.epochs), accuracy, paper.where if paper else ""


def _in_words(recipe: Recipe) -> str:
    """Describe the network, its connectivity, the number of epochs and the data."""
    from maskconnect.recipes.naming import fan_in_of, network_name

    model = recipe.model
    connected = model.connectivity if isinstance(model.connectivity, str) else "explicit wiring"
    if connected in ("learned", "random"):
        connected += f" K={fan_in_of(model)}"
    return f"{network_name(model)}, {connected}, {recipe.epochs} epoch{'s' * (recipe.epochs > 1)} of {recipe.data.name}"
