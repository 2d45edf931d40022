"""Save and load a network as files: weights as safetensors, and a description as JSON.

maskconnect.json     architecture, wiring, classes, preprocessing, version, checksums
model.safetensors    weights and masks
input.safetensors    the mean to subtract from images, if there is one

A network that replaces another uses other file names; replacing the description then switches to them atomically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError, shown
from maskconnect.ship.description import NAME, read_description, write_description
from maskconnect.ship.rebuild import comes_back, describe, rebuilt
from maskconnect.training.files import held, load_tensors, remove_unfinished, save_tensors

if TYPE_CHECKING:
    from maskconnect.ship.preprocessing import Preprocessing

SAVING = ".saving"
"""The lock file of a folder that a process saves into; it stays if the process is killed."""

MODEL, INPUT = ("model.safetensors", "model-2.safetensors"), ("input.safetensors", "input-2.safetensors")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A network with its classes and preprocessing."""

    network: nn.Module
    kind: str  # "learned" (masks still learning), "frozen" or "pruned"
    classes: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Save a network with learned connectivity to a folder: still learning, frozen, or pruned.

    An earlier network in the folder is replaced atomically. `mc.load` rebuilds networks of `mc.resnet`,
    `mc.resnext` and `mc.mixed`, pruned or not; `save` checks this before it writes. For other modules, pass a model:
    `mc.load(folder, into=model)`.

    Args:
        model: the network; its weights may be on any device.
        folder: the folder; it is created if needed.
        classes: the names of the classes, for `maskconnect predict`.
        preprocessing: how images become inputs, for `maskconnect predict`.
    """
    described = describe(model)
    _check_use(described["architecture"], classes, preprocessing)
    tensors = _tensors(model)
    if described["architecture"] is not None and not comes_back(model, described, tensors):
        described["architecture"] = None  # changed by its user since it was built
    described["classes"] = None if classes is None else list(classes)
    described["preprocessing"] = None if preprocessing is None else preprocessing.describe()
    mean = None if preprocessing is None else preprocessing.mean
    try:
        _write(Path(folder), described, tensors, mean)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error}; choose another folder."
        ) from None


def load(folder: str | Path, into: nn.Module | None = None) -> nn.Module:
    """Load the network in a folder that `mc.save` wrote, on the CPU and in eval mode.

    Args:
        folder: the folder.
        into: for a network of your own modules: a model built as the saved one was, before it was pruned. The
            weights are loaded into it; if the saved network is pruned, into a pruned copy with the saved wiring.
    """
    if not isinstance(folder, str | Path):
        raise ConfigError(f"folder is a {type(folder).__name__}; it must be a path.")
    return _read(Path(folder), into).network


def read(folder: Path) -> Saved:
    """Return the network in a folder, with its classes and its preprocessing."""
    return _read(folder, None)


def _read(folder: Path, into: nn.Module | None) -> Saved:
    described = read_description(folder)
    tensors = load_tensors(folder / described["weights"])
    try:
        network = rebuilt(described, tensors, into, str(folder))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        fix = "Use another copy" + ("." if into is None else ", or build the model as the saved one was built.")
        raise CheckpointError(
            f"{folder / NAME} does not describe a network that can be built: {reason.rstrip('.')}. {fix}"
        ) from None
    classes = described["classes"]
    return Saved(
        network=network.eval(),
        kind=described["kind"],
        classes=None if classes is None else tuple(classes),
        preprocessing=_preprocessing(folder, described),
    )


def _preprocessing(folder: Path, described: Mapping[str, Any]) -> Preprocessing | None:
    if described["preprocessing"] is None:
        return None
    from maskconnect.ship.preprocessing import from_description

    mean = load_tensors(folder / (described["mean"] or "")).get("mean", torch.empty(0))
    return from_description(described["preprocessing"], mean, where=f"{folder / NAME}: preprocessing")


def _check_use(
    architecture: Mapping[str, Any] | None, classes: Sequence[str] | None, preprocessing: Preprocessing | None
) -> None:
    """Raise an error if classes or preprocessing are invalid, or do not fit the network."""
    from maskconnect.ship.preprocessing import Preprocessing

    if classes is not None and (isinstance(classes, str) or not all(isinstance(name, str) for name in classes)):
        raise ConfigError(f"classes is {shown(classes)}; it must be a list of names.")
    if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
        kind = f"{Preprocessing.__module__}.{Preprocessing.__name__}"
        raise ConfigError(f"preprocessing is a {type(preprocessing).__name__}; it must be a {kind}.")
    if architecture is None:
        return
    if classes is not None and len(classes) != architecture["num_classes"]:
        raise ConfigError(
            f"there are {len(classes)} classes, but the network has {architecture['num_classes']} outputs; pass one "
            "name per output."
        )
    if preprocessing is not None and preprocessing.channels != architecture["in_channels"]:
        channels = f"{preprocessing.channels} channels; the network needs {architecture['in_channels']}"
        raise ConfigError(f"the preprocessing makes images with {channels}. Pass the preprocessing of this network.")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the state of the model contains a {type(value).__name__} ({name}); it must contain only tensors."
            )
    return state


def _write(folder: Path, described: dict[str, Any], tensors: dict[str, Tensor], mean: Tensor | None) -> None:
    """Write a network, unless there are other files; first remove what a killed process left."""
    folder.mkdir(parents=True, exist_ok=True)
    killed = (folder / SAVING).exists()
    with held(folder / SAVING):
        before = _files_of(folder)
        surplus = [name for name in (*MODEL, *INPUT) if name not in before and (folder / name).exists()]
        if surplus and not before and not killed:
            (folder / SAVING).unlink()
            found = folder / surplus[0]
            raise ConfigError(f"{found} exists and is not part of a saved network; choose another folder.")
        if killed:
            remove_unfinished(folder)
            for name in surplus:
                (folder / name).unlink()
        _write_files(folder, described, tensors, mean, before)


def _write_files(
    folder: Path, described: dict[str, Any], tensors: dict[str, Tensor], mean: Tensor | None, before: set[str]
) -> None:
    """Write the tensors under unused names, then the description atomically, then remove the old files."""
    model, given = (next(name for name in names if name not in before) for names in (MODEL, INPUT))
    try:
        save_tensors(folder / model, tensors)
        if mean is not None:
            save_tensors(folder / given, {"mean": mean})
        described |= {"weights": model, "mean": None if mean is None else given}
        write_description(folder, described, [model] if mean is None else [model, given])
    except BaseException:
        for name in (model, given, SAVING):
            (folder / name).unlink(missing_ok=True)
        raise
    for name in before:
        (folder / name).unlink(missing_ok=True)


def _files_of(folder: Path) -> set[str]:
    """Return the files of an earlier network in this folder, if there is one."""
    if not (folder / NAME).exists():
        return set()
    try:
        return set(read_description(folder)["files"]) & {*MODEL, *INPUT}
    except MaskConnectError:  # a damaged one
        return {name for name in (MODEL[0], INPUT[0]) if (folder / name).exists()}
