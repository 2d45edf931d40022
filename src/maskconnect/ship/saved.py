"""A network as files: weights as safetensors, and a description as JSON that says what they are of.

maskconnect.json     architecture, wiring, classes, preprocessing, version, checksums
model.safetensors    the weights, and what masks there are
input.safetensors    the mean that is subtracted from pictures, where there is one
"""

from __future__ import annotations

import copy
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.compare import difference
from maskconnect.core.count import stacks_of
from maskconnect.core.graphs import NOTES
from maskconnect.core.loop import masks_of
from maskconnect.core.plan import Plan
from maskconnect.core.prune import apply
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError
from maskconnect.models import Classifier, build, read_spec
from maskconnect.models.groups import GroupedBatchNorm2d, group_norms_
from maskconnect.ship.description import NAME, read_description, write_description
from maskconnect.training.files import TEMPORARY, fsync_folder, load_tensors, save_tensors

if TYPE_CHECKING:
    from maskconnect.ship.preprocessing import Preprocessing

MODEL, INPUT = "model.safetensors", "input.safetensors"
PROBE = 64
"""The side of the pictures on which a network is compared with what would be loaded."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A network, and what is needed to use it."""

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
    """Write a network with learned connectivity to a folder: still learning, frozen, or pruned.

    A network that was saved there before is replaced, as a whole. `mc.load` rebuilds those of `mc.resnet` and
    `mc.resnext`, pruned ones too, and this is tried before anything is written; it puts one of your own modules
    into a model that you give it.

    Args:
        model: the network; its weights may be on any device.
        folder: where to; it is made, if need be.
        classes: the names of the classes, for `maskconnect predict`.
        preprocessing: how pictures become inputs, likewise.
    """
    described = _describe(model)
    tensors = _tensors(model)
    if described["architecture"] is not None and not _comes_back(model, described, tensors):
        described["architecture"] = None  # changed by its user since it was built
    described["classes"] = None if classes is None else list(classes)
    described["preprocessing"] = None if preprocessing is None else preprocessing.describe()
    mean = None if preprocessing is None else preprocessing.mean
    try:
        _write(Path(folder), described, tensors, mean)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from None


def load(folder: str | Path, into: nn.Module | None = None) -> nn.Module:
    """The network in a folder that `mc.save` wrote, on the CPU and in eval mode.

    Args:
        folder: where it is.
        into: for a network of your own modules: a model built as the saved one was, before it was pruned. It gets the
            weights; if a pruned network was saved, a pruned copy with the saved wiring gets them, and is returned.
    """
    return _read(Path(folder), into).network


def read(folder: Path) -> Saved:
    """The network in a folder, with its classes and its preprocessing."""
    return _read(folder, None)


def _read(folder: Path, into: nn.Module | None) -> Saved:
    described = read_description(folder)
    tensors = load_tensors(folder / MODEL)
    try:
        network = _rebuilt(described, tensors, into, str(folder))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} does not describe a network: {error!r}.") from None
    classes = described["classes"]
    return Saved(
        network=network.eval(),
        kind=described["kind"],
        classes=None if classes is None else tuple(classes),
        preprocessing=_preprocessing(folder, described["preprocessing"]),
    )


def _preprocessing(folder: Path, described: Any) -> Preprocessing | None:
    if described is None:
        return None
    from maskconnect.ship.preprocessing import from_description

    return from_description(described, load_tensors(folder / INPUT)["mean"], where=f"{folder / NAME}: preprocessing")


def _describe(model: nn.Module) -> dict[str, Any]:
    """What a network is, but for its weights."""
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        hint = " Save model.module." if isinstance(model, DistributedDataParallel) else ""
        raise ConfigError(f"model is a {type(model).__name__}; it must be a network of modules.{hint}")
    stacks = {name: part for name, part in model.named_modules() if isinstance(part, MaskedStack)}
    if stacks:
        groups = {part.group for part in model.modules() if isinstance(part, GroupedBatchNorm2d)}
        return {
            "kind": "frozen" if all(m.is_frozen for m in masks_of(model)) else "learned",
            "architecture": model.describe() if isinstance(model, Classifier) else None,
            "norm_group": min(groups, default=None),
            "stacks": {name: {"wiring": stack.wiring()} for name, stack in stacks.items()},
        }
    notes = {name: part.meta[NOTES] for name, part in model.named_modules() if NOTES in getattr(part, "meta", {})}
    for name, note in notes.items():
        if isinstance(model, fx.GraphModule) or note["path"] == name:
            parts = ("fold", "merge", "stacks")
            architecture = notes[""].get("architecture") if "" in notes else None
            return {"kind": "pruned", "architecture": architecture, **{part: note[part] for part in parts}}
    raise ConfigError(
        f"there is no MaskedStack in this {type(model).__name__}, and it did not come from mc.prune as a whole; "
        "save other networks with torch or safetensors."
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the state of the model has a {type(value).__name__} in it ({name}); only tensors are saved."
            )
    return state


def _comes_back(model: nn.Module, described: Mapping[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Whether a network that is rebuilt and loaded computes what this one does."""
    try:
        again = _rebuilt(described, {name: value.detach().cpu() for name, value in tensors.items()}, None, "")
        like = next(p for p in model.parameters() if p.is_floating_point())
        x = torch.linspace(-2, 2, described["architecture"]["in_channels"] * PROBE**2, dtype=like.dtype)
        x = x.reshape(1, -1, PROBE, PROBE).sin().to(like.device)
        return difference(model, again.to(like.device), x) < 1e-5
    except (MaskConnectError, RuntimeError):
        return False


def _rebuilt(described: Mapping[str, Any], tensors: dict[str, Tensor], into: nn.Module | None, where: str) -> nn.Module:
    """The network that was described, with the given tensors."""
    if into is None and described["architecture"] is None:
        raise ConfigError(
            f"{where} holds a network of somebody's own modules, which only their code can build: build the model as "
            "it was before it was saved (or pruned) and call mc.load(folder, into=model)."
        )
    network = _built(described) if into is None else into
    if described["kind"] == "pruned" and any(isinstance(part, MaskedStack) for part in network.modules()):
        network = _pruned(network if into is None else copy.deepcopy(into), described)
    _check_tensors(network, tensors, where, dtypes=into is not None)
    network.load_state_dict(tensors, assign=into is None)
    return network


def _built(described: Mapping[str, Any]) -> nn.Module:
    with torch.random.fork_rng([]):  # its weights are drawn, and will be replaced
        network = build(read_spec(described["architecture"]))
    group_norms_(network, described.get("norm_group"))
    return network


def _pruned(model: nn.Module, described: Mapping[str, Any]) -> nn.Module:
    """The model, wired and pruned as described."""
    plans = {}
    for name, stack in stacks_of(model):
        if name not in described["stacks"]:
            raise CheckpointError(f"the model has a stack {name!r}; the saved network had none of that name.")
        stack.masks.fix(stack.layout.from_plain(described["stacks"][name]["wiring"], what="the saved wiring"))
        plans[name] = Plan.read(described["stacks"][name])
    return apply(model, plans, fold=described["fold"], merge=described["merge"])


def _check_tensors(network: nn.Module, tensors: Mapping[str, Tensor], where: str, *, dtypes: bool) -> None:
    """Every tensor of the network is there, and no other."""
    own = network.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors:
            which = "the saved network" if name in tensors else "the model"
            raise CheckpointError(f"{where} is of another network: only {which} has {name}.")
        theirs, ours = tensors[name], own[name]
        if theirs.shape != ours.shape:
            shapes = f"{tuple(theirs.shape)} there and {tuple(ours.shape)} in the model"
            raise CheckpointError(f"{where} is of another network: {name} is {shapes}.")
        if dtypes and theirs.dtype != ours.dtype:
            raise CheckpointError(
                f"{where} has {name} in {theirs.dtype}, the model in {ours.dtype}; convert the model."
            )


def _write(folder: Path, described: dict[str, Any], tensors: dict[str, Tensor], mean: Tensor | None) -> None:
    """Write all files aside, then put them in their place."""
    if not (folder / NAME).exists():
        for name in (MODEL, INPUT):
            if (folder / name).exists():
                raise ConfigError(f"{folder / name} exists and is of something else; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        aside.mkdir()
        save_tensors(aside / MODEL, tensors)
        if mean is not None:
            save_tensors(aside / INPUT, {"mean": mean})
        files = [MODEL] if mean is None else [MODEL, INPUT]
        write_description(aside, described, files)
        (folder / NAME).unlink(missing_ok=True)  # what is half replaced cannot be loaded
        (folder / INPUT).unlink(missing_ok=True)
        for name in (*files, NAME):
            (aside / name).replace(folder / name)
        fsync_folder(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
