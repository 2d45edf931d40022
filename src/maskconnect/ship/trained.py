"""Load the trained network of a run, without its images."""

from __future__ import annotations

from pathlib import Path

from maskconnect.core.lookup import masks_of
from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.ship import saved
from maskconnect.ship.preprocessing import of_recipe
from maskconnect.ship.saved import Saved
from maskconnect.training import options
from maskconnect.training.folder import INPUT
from maskconnect.training.loading import ended, trained_classes, trained_network
from maskconnect.training.options import Options


def from_run(path: Path, device: str = "cpu") -> Saved:
    """Return the network of a finished run, with its classes and its preprocessing, from the files in its folder."""
    folder = ended(path)
    recipe, classes, mean = folder.recipe(), trained_classes(folder), folder.mean()
    try:
        preprocessing = of_recipe(recipe, mean)
    except ConfigError as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(
            f"{path / INPUT} does not fit the recipe of the run: {reason}. Use another copy of the run."
        ) from None
    machine = options.prepare(Options(device=device))
    network = trained_network(folder, recipe, len(classes), preprocessing.channels, machine)
    kind = "frozen" if all(masks.is_frozen for masks in masks_of(network)) else "learned"
    return Saved(network=network, kind=kind, classes=classes, preprocessing=preprocessing)


def open_folder(path: Path) -> Saved:
    """Return the network in the folder of a run, or in that of a saved network, on the CPU."""
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {found}; pass the folder of a run, or of a saved network.")
    return from_run(path) if (path / "recipe.toml").exists() else saved.read(path)
