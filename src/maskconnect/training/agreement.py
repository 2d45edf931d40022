"""Check before a run starts that all ranks have the same recipe and the same options that affect the result.

Ranks that differ would hang, fail later with a less clear error, or train a network that no recipe describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from maskconnect.errors import ConfigError, ReportedElsewhereError
from maskconnect.recipes.schema import Recipe
from maskconnect.recipes.write import assignments, write
from maskconnect.training.options import Options
from maskconnect.training.ranks import Ranks

OWN = ("data", "threads", "workers", "checkpoint_every")
"""Options in which ranks may differ: the place of the images (the images themselves are compared), the speed of a
machine, and checkpoints, which only rank 0 writes."""

LONGEST = 60
"""The number of characters of a value that are shown; a wiring may have thousands."""


def check_agreement(recipe: Recipe, how: Options, ranks: Ranks) -> None:
    """Raise an error on all ranks that names the first field in which two of them differ."""
    if ranks.count == 1:
        return
    difference = first_difference(ranks.gather_plain(stated(recipe, how)))
    if difference is not None:
        kind = ConfigError if ranks.first else ReportedElsewhereError
        raise kind(f"{difference}; start all ranks with the same recipe and options.")


def stated(recipe: Recipe, how: Options) -> dict[str, str]:
    """Return everything that must be the same on every rank, by its name on the command line."""
    start = (
        None if recipe.init_from is None else "given"
    )  # paths may differ; the weights are compared after they are read
    plain = replace(recipe, name="", about="", paper=None, init_from=start)
    options = {field.name: str(getattr(how, field.name)) for field in fields(how) if field.name not in OWN}
    options["device"] = _device(how.device)
    return assignments(write(plain)) | {f"--{name.replace('_', '-')}": value for name, value in options.items()}


def first_difference(found: Sequence[dict[str, str]]) -> str | None:
    """Return the first difference between a rank and rank 0, in words."""
    for rank, theirs in enumerate(found):
        for field in {**found[0], **theirs}:
            ours, other = (_short(each.get(field, "not set")) for each in (found[0], theirs))
            if found[0].get(field) != theirs.get(field):
                return f"{field} is {ours} on rank 0 and {other} on rank {rank}"
    return None


def _device(name: str) -> str:
    """Return the type of a device; each rank has its own device of that type."""
    kind = name.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
