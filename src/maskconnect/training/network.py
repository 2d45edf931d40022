"""The network of a run, as it starts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.models import build, save_memory_
from maskconnect.models.groups import group_norms_
from maskconnect.models.synced import synchronise_norms_
from maskconnect.recipes.schema import Recipe
from maskconnect.training.files import load_tensors
from maskconnect.training.folder import MODEL
from maskconnect.training.options import Machine


def make_network(recipe: Recipe, classes: int, channels: int, machine: Machine, *, synced: bool = False) -> nn.Module:
    """The network of a recipe, as it starts; `synced` if its batch norms go over all ranks."""
    torch.manual_seed(recipe.seed)
    network = build(recipe.model.spec(num_classes=classes, in_channels=channels, seed=recipe.seed))
    if synced:
        synchronise_norms_(network)
    else:
        group_norms_(network, recipe.training.norm_group)
    if machine.lean:
        save_memory_(network)
    if machine.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.to(machine.device, machine.precision.dtype)


def is_synced(recipe: Recipe, ranks: int, norm: str) -> bool:
    """Whether batch norms go over all ranks: if asked to, or if the recipe has them see more than a rank has."""
    training = recipe.training
    own = training.batch_size // ranks
    if norm != "recipe" or ranks == 1:
        return norm == "sync" and ranks > 1
    if training.norm_group is None:
        return True
    if own % training.norm_group:
        raise ConfigError(
            f"training.norm_group is {training.norm_group}, and each of {ranks} ranks has {own} images of a batch, "
            "which are no whole groups; take another --nproc, or say --norm local or --norm sync."
        )
    return False


def load_weights(network: nn.Module, place: Path) -> str:
    """Start from the trained weights of a run (or of a folder with a model.safetensors); masks start anew.

    A classifier for another number of classes starts anew too. Returns what was done, in a sentence.
    """
    file = next((file for name in (MODEL, "model*.safetensors") for file in sorted(place.glob(name))), None)
    if file is None:
        raise ConfigError(f"--init-from {place}: there is no {MODEL} in it; name the folder of a run that has ended.")
    saved = {name: value for name, value in load_tensors(file).items() if ".masks." not in name}
    own = {name: value for name, value in network.state_dict().items() if ".masks." not in name}
    anew = [
        name
        for name in own
        if name.startswith("classifier.") and name in saved and saved[name].shape != own[name].shape
    ]
    missing = own.keys() - saved.keys()
    surplus = saved.keys() - own.keys()
    wrong = [name for name in own if name in saved and name not in anew and saved[name].shape != own[name].shape]
    if missing or surplus or wrong:
        name = sorted(missing | surplus | set(wrong))[0]
        raise CheckpointError(f"{file} is of another network: {name} is not the same in both.")
    network.load_state_dict({name: saved[name] for name in own if name not in anew}, strict=False)
    return f"starting from the weights in {file}" + (", with a new classifier" if anew else "")
