"""Build the network of a run, with new or given weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.models import build, save_memory_
from maskconnect.models.groups import group_norms_
from maskconnect.models.synced import synchronize_norms_
from maskconnect.recipes.schema import Recipe
from maskconnect.training.files import load_tensors
from maskconnect.training.folder import MODEL
from maskconnect.training.options import Machine


def make_network(recipe: Recipe, classes: int, channels: int, machine: Machine, *, synced: bool = False) -> nn.Module:
    """Return the network of a recipe with new weights; `synced` if its batch norms span all ranks."""
    torch.manual_seed(recipe.seed)
    network = build(recipe.model.spec(num_classes=classes, in_channels=channels, seed=recipe.seed))
    if synced:
        synchronize_norms_(network)
    else:
        group_norms_(network, recipe.training.norm_group)
    if machine.lean:
        save_memory_(network)
    if machine.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.to(machine.device, machine.precision.dtype)


def is_synced(recipe: Recipe, ranks: int, norm: str) -> bool:
    """Return whether batch norms span all ranks: if requested, or if a group is larger than one rank's images."""
    training = recipe.training
    own = training.batch_size // ranks
    if norm != "recipe" or ranks == 1:
        return norm == "sync" and ranks > 1
    if training.norm_group is None:
        return True
    if own % training.norm_group:
        raise ConfigError(
            f"training.norm_group is {training.norm_group}; it must divide the {own} images per batch that each of "
            f"{ranks} ranks has. Change --nproc, or use --norm local or --norm sync."
        )
    return False


def load_weights(network: nn.Module, place: Path) -> str:
    """Load the trained weights of a run, or of a folder with a model.safetensors; masks keep their initial values.

    So does a classifier for another number of classes. Returns a sentence that says what was loaded.
    """
    file = next((file for name in (MODEL, "model*.safetensors") for file in sorted(place.glob(name))), None)
    if file is None:
        raise ConfigError(f"--init-from is {place}, which has no {MODEL}; pass the folder of a finished run.")
    saved = {name: value for name, value in load_tensors(file).items() if ".masks." not in name}
    own = {name: value for name, value in network.state_dict().items() if ".masks." not in name}
    fresh = [
        name
        for name in own
        if name.startswith("classifier.") and name in saved and saved[name].shape != own[name].shape
    ]
    missing = own.keys() - saved.keys()
    surplus = saved.keys() - own.keys()
    wrong = [name for name in own if name in saved and name not in fresh and saved[name].shape != own[name].shape]
    if missing or surplus or wrong:
        name = sorted(missing | surplus | set(wrong))[0]
        raise CheckpointError(
            f"{file} belongs to another network: {name} differs. Use weights of the same architecture; instead of a "
            "pruned network, which lacks modules, pass its run."
        )
    network.load_state_dict({name: saved[name] for name in own if name not in fresh}, strict=False)
    return f"starting from the weights in {file}" + (", with a new classifier" if fresh else "")
