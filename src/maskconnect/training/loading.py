"""Load the network of a finished run from its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from maskconnect.data.catalog import WITHOUT_FOLDER
from maskconnect.errors import CheckpointError, cut
from maskconnect.recipes.schema import Recipe
from maskconnect.training import images, options
from maskconnect.training.folder import CLASSES, DATA, MODEL, RunFolder
from maskconnect.training.images import Prepared
from maskconnect.training.network import make_network
from maskconnect.training.options import Machine, Options
from maskconnect.training.predictions import predict


def evaluate_run(path: Path, how: Options) -> tuple[dict[str, float], int]:
    """Return loss, top-1 and top-5 on the test set of a run, and the number of test images."""
    network, prepared, machine = load_run(path, how)
    found = predict(network, prepared.test, machine, lambda: None)
    return asdict(found.scores()), len(prepared.test.images)


def accuracies(path: Path, how: Options, networks: Sequence[nn.Module]) -> list[float] | None:
    """Return the top-1 of networks on the test set of a run; None if the set needs a folder and `how` has none."""
    folder = ended(path)
    recipe = folder.recipe()
    if how.data is None and recipe.data.name not in WITHOUT_FOLDER:
        return None
    machine = options.prepare(how)
    prepared = _images(folder, recipe, how, machine)
    return [predict(network, prepared.test, machine, lambda: None).scores().top1 for network in networks]


def load_run(path: Path, how: Options) -> tuple[nn.Module, Prepared, Machine]:
    """Return the trained network of a run, and its images."""
    folder = ended(path)
    recipe, machine = folder.recipe(), options.prepare(how)
    prepared = _images(folder, recipe, how, machine)
    network = trained_network(folder, recipe, len(prepared.classes), prepared.channels, machine)
    return network, prepared, machine


def _images(folder: RunFolder, recipe: Recipe, how: Options, machine: Machine) -> Prepared:
    """Return the images of a run; an error if they have changed."""
    prepared = images.prepare(recipe, how, machine.device, mean=folder.mean())
    prepared.compare(folder.data())
    return prepared


def ended(path: Path) -> RunFolder:
    """Return the folder of a finished run; an error if the run has not finished."""
    folder = RunFolder(path)
    folder.summary()
    return folder


def trained_classes(folder: RunFolder) -> tuple[str, ...]:
    """Return the names of the classes that a run was trained on."""
    found = folder.classes()
    if tuple(folder.data()["classes"]) != found:
        raise CheckpointError(
            f"{folder.path / CLASSES} and {DATA} of the run name different classes; use another copy of the run."
        )
    return found


def trained_network(folder: RunFolder, recipe: Recipe, classes: int, channels: int, machine: Machine) -> nn.Module:
    """Return the final network of a run, without changing the state of torch's random generator."""
    with torch.random.fork_rng(devices=[]):
        network = make_network(recipe, classes, channels, machine)
    try:
        network.load_state_dict(folder.tensors(MODEL))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = cut(str(error).splitlines()[-1].strip().rstrip("."))  # the first line of torch names only the class
        raise CheckpointError(
            f"{folder.path / MODEL} does not fit the recipe of the run: {reason}. Use another copy of the run."
        ) from None
    return network.eval()
