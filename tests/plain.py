"""A model of ours in the form of the plain networks that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from maskconnect.bench.plain import PlainBlock, PlainModule, PlainResNet, PlainResNeXt

__all__ = ["PlainBlock", "PlainModule", "PlainResNeXt", "PlainResNet", "resnet_as_plain", "resnext_as_plain"]

Pick = Callable[[Tensor], Tensor]


def resnet_as_plain(model: nn.Module, pick: Pick = lambda p: p.detach()) -> dict[str, Tensor]:
    """Our ResNet under the names of `PlainResNet`: its parameters and buffers, or what `pick` makes of each."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "masks." in name:
            continue
        parts = name.replace("stack.blocks", "blocks").replace("classifier", "fc").split(".")
        if parts[0] == "blocks" and parts[2] == "residual":
            position = int(parts[3])
            parts[2:4] = ["convs" if position % 3 == 0 else "norms", str(position // 3)]
        elif parts[0] == "blocks":
            parts[2:4] = ["project" if parts[3] == "0" else "project_norm"]
        found[".".join(parts)] = pick(tensor)
    return found


RESNEXT_LAYERS = {0: "reduce", 1: "reduce_norm", 3: "grouped", 4: "grouped_norm", 6: "expand", 7: "expand_norm"}


def resnext_as_plain(model: nn.Module, norm: str, pick: Pick = lambda p: p.detach()) -> dict[str, Tensor]:
    """Our ResNeXt under the names of `PlainResNeXt`, the branches of a module joined."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    found = {
        name.replace("classifier", "fc"): pick(t)
        for name, t in tensors.items()
        if name.startswith(("stem", "classifier"))
    }
    for layer, branches in enumerate(model.stack.blocks):
        for name in [name for name, _ in [*branches[0].named_parameters(), *branches[0].named_buffers()]]:
            _, position, leaf = name.split(".")
            parts = [pick(tensors[f"stack.blocks.{layer}.{k}.{name}"]) for k in range(len(branches))]
            inner = norm == "sum" and position == "6"
            joined = parts[0] if leaf == "num_batches_tracked" else torch.cat(parts, dim=1 if inner else 0)
            found[f"blocks.{layer}.{RESNEXT_LAYERS[int(position)]}.{leaf}"] = joined
    for name, t in tensors.items():
        if name.startswith("stack.aggregation"):
            _, _, kind, layer, *rest = name.split(".")
            role = "expand_norm" if kind == "norms" else "project" if rest[0] == "conv" else "project_norm"
            found[f"blocks.{layer}.{role}.{rest[-1]}"] = pick(t)
    return found
