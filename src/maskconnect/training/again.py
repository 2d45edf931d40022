"""The network of a run that has ended, from its files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch import nn

from maskconnect.errors import CheckpointError
from maskconnect.training import images, options
from maskconnect.training.evaluate import predict
from maskconnect.training.folder import DATA, INPUT, MODEL, RunFolder
from maskconnect.training.images import Prepared
from maskconnect.training.network import make_network
from maskconnect.training.options import Machine, Options


def evaluate_run(path: Path, how: Options) -> tuple[dict[str, float], int]:
    """Loss, top-1 and top-5 on the run's test set, and how many images that has."""
    network, prepared, machine = load_run(path, how)
    found = predict(network, prepared.test, machine, lambda: None)
    return asdict(found.scores()), len(prepared.test.images)


def load_run(path: Path, how: Options) -> tuple[nn.Module, Prepared, Machine]:
    """The trained network of a run, and its images."""
    folder = RunFolder(path)
    folder.summary()  # says what is wrong where the run has not ended
    recipe, machine = folder.recipe(), options.prepare(how)
    prepared = images.prepare(recipe, how, machine.device, mean=folder.tensors(INPUT)["mean"])
    prepared.compare(folder.json(DATA))
    network = make_network(recipe, len(prepared.classes), prepared.channels, machine)
    try:
        network.load_state_dict(folder.tensors(MODEL))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path / MODEL} does not fit the recipe beside it: {reason}") from None
    return network.eval(), prepared, machine
