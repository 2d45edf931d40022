"""Describe a network as plain data, and rebuild it from that."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.lookup import masks_of, stacks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError, shown
from maskconnect.models import Classifier, build, read_spec
from maskconnect.models.groups import GroupedBatchNorm2d, group_norms_
from maskconnect.pruning.graphs import notes_of
from maskconnect.pruning.plan import Plan
from maskconnect.pruning.prune import apply
from maskconnect.pruning.rewired import read_forms_
from maskconnect.pruning.verify import difference
from maskconnect.retrofit.stack import TappedStack

PROBE = 64
"""The side of the image on which a network is compared with its rebuilt copy."""


def describe(model: nn.Module) -> dict[str, Any]:
    """Return the description of a network, without its weights."""
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        hint = " Save model.module." if isinstance(model, DistributedDataParallel) else ""
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.{hint}")
    named = model.named_modules(remove_duplicate=False)
    stacks = {name: part for name, part in named if isinstance(part, MaskedStack)}
    if stacks:
        groups = {part.group for part in model.modules() if isinstance(part, GroupedBatchNorm2d)}
        return {
            "kind": "frozen" if all(m.is_frozen for m in masks_of(model)) else "learned",
            "architecture": model.describe() if isinstance(model, Classifier) else None,
            "norm_group": min(groups, default=None),
            "stacks": {
                name: {"wiring": stack.wiring(), "aggregation": stack.described_aggregation()}
                for name, stack in stacks.items()
            },
        }
    notes = notes_in(model)
    for name, note in notes.items():
        if note["path"] == name:
            parts = ("fold", "merge", "stacks")
            architecture = notes[""].get("architecture") if "" in notes else None
            return {"kind": "pruned", "architecture": architecture, **{part: note[part] for part in parts}}
    raise ConfigError(
        f"this {type(model).__name__} has no MaskedStack and did not come from mc.prune as a whole; save it with torch "
        "or safetensors."
    )


def notes_in(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the notes on how the parts of a pruned network were made, by name."""
    return {name: notes_of(part) for name, part in model.named_modules() if notes_of(part)}


def rebuilt(described: Mapping[str, Any], tensors: dict[str, Tensor], into: nn.Module | None, where: str) -> nn.Module:
    """Return the described network with the given tensors."""
    if into is None and described["architecture"] is None:
        raise ConfigError(
            f"{where} holds a network of custom modules, which only their code can build: build the model as it was "
            "before it was saved (or pruned) and call mc.load(folder, into=model)."
        )
    rewired = [name for name, stack in described["stacks"].items() if "forms" in stack]
    bare = into is not None and not notes_in(into) and not stacks_of(into)
    if rewired and bare:
        raise ConfigError(
            f"{where} holds a rewired network, but the model is not rewired; pass into=mc.rewire(model, "
            f"{rewired[0]!r}, ...), as it was before it was pruned."
        )
    network = _built(described) if into is None else into
    fix = "Use another copy." if into is None else "Build the model with the same arguments as the saved one."
    _compare_stacks(network, described, where, fix)
    if described["kind"] == "pruned" and any(isinstance(part, MaskedStack) for part in network.modules()):
        network = _pruned(network if into is None else copy.deepcopy(into), described, fix)
    _check_tensors(network, tensors, where, fix, dtypes=into is not None)
    network.load_state_dict(tensors, assign=into is None)
    return network


def _built(described: Mapping[str, Any]) -> nn.Module:
    """Build the network on the meta device, so that a hostile description cannot request much memory."""
    spec = read_spec(described["architecture"])
    for stack in described["stacks"].values():  # so that a short description cannot cause much work
        spec.layout.rows(stack["wiring"], "the saved wiring")
    with torch.device("meta"):
        network = build(spec)
    group_norms_(network, described.get("norm_group"))
    return network


def _compare_stacks(network: nn.Module, described: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise an error if the stacks of a model differ from the saved ones, except for wiring that is loaded.

    `fix` says what the user can do about it.
    """
    own = describe(network)
    pruned = own["kind"] == "pruned"
    if pruned:
        fix = f"{fix.rstrip('.')}, and do not prune it."
    keys = ("aggregation", "wiring", "steps", "arguments", "forms") if pruned else ("aggregation",)
    for name, stack in described["stacks"].items():
        found = own["stacks"].get(name)
        if found is None:
            raise CheckpointError(f"{where} holds another network: the model has no stack {shown(name)}. {fix}")
        for key in keys:
            if json.dumps(found.get(key)) != json.dumps(stack.get(key)):
                raise CheckpointError(
                    f"{where} holds another network: the stack {shown(name)} differs in its {key}. {fix}"
                )
    for key in ("fold", "merge") if pruned else ():
        if own[key] != described.get(key):
            raise CheckpointError(
                f"{where} was pruned with {key}={described.get(key)}, the model with {key}={own[key]}. Prune the model "
                "with the same options."
            )


def _pruned(model: nn.Module, described: Mapping[str, Any], fix: str) -> nn.Module:
    """Return the model, wired and pruned as described."""
    plans = {}
    for name, stack in stacks_of(model):
        if name not in described["stacks"]:
            raise CheckpointError(f"the model has a stack {shown(name)}; the saved network does not. {fix}")
        stack.masks.fix(stack.layout.from_plain(described["stacks"][name]["wiring"], what="the saved wiring"))
        if isinstance(stack, TappedStack):
            read_forms_(stack, described["stacks"][name])
        else:
            plans[name] = Plan.read(described["stacks"][name])
    return apply(model, plans, fold=described["fold"], merge=described["merge"])


def _check_tensors(network: nn.Module, tensors: Mapping[str, Tensor], where: str, fix: str, *, dtypes: bool) -> None:
    """Raise an error if the tensors are not exactly those of the network."""
    own = network.state_dict()
    free = {
        name for name in own if name.endswith(("masks._extra_state", "masks.progress", "masks.square"))
    }  # they depend on the way to learn
    for name in sorted((own.keys() | tensors.keys()) - free):
        if name not in own or name not in tensors:
            which = "the saved network" if name in tensors else "the model"
            raise CheckpointError(f"{where} holds another network: only {which} has {name}. {fix}")
        theirs, ours = tensors[name], own[name]
        if theirs.shape != ours.shape:
            shapes = f"{tuple(theirs.shape)} there and {tuple(ours.shape)} in the model"
            raise CheckpointError(f"{where} holds another network: {name} is {shapes}. {fix}")
        if dtypes and theirs.dtype != ours.dtype:
            how = f", for example with model.to({theirs.dtype})" if theirs.is_floating_point() else ""
            raise CheckpointError(
                f"{where} has {name} in {theirs.dtype}, the model in {ours.dtype}; convert the model{how}."
            )
        if name.endswith(("masks.source", "masks.fan_in")) and not torch.equal(theirs.cpu(), ours.cpu()):
            raise CheckpointError(f"{where} holds another network: {name} differs from the model's. {fix}")


def comes_back(model: nn.Module, described: Mapping[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Return whether the rebuilt and loaded network computes the same as this one."""
    try:
        again = rebuilt(described, {name: value.detach().cpu() for name, value in tensors.items()}, None, "")
        like = next(p for p in model.parameters() if p.is_floating_point())
        x = torch.linspace(-2, 2, described["architecture"]["in_channels"] * PROBE**2, dtype=like.dtype)
        x = x.reshape(1, -1, PROBE, PROBE).sin().to(like.device)
        return difference(model, again.to(like.device), x) < 1e-5
    except (MaskConnectError, RuntimeError):
        return False
