"""Put masks into a model that already exists, with its trained weights (section 3.2, for anybody's network)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError, shown
from maskconnect.retrofit.dense_block import is_dense_block, rewire_dense_blocks
from maskconnect.retrofit.taps import TappedStack

CLOSE = 0.01
"""Where masks start in a trained network: every candidate a hundredth as likely as the next nearer one."""


def rewire(
    model: nn.Module,
    path: str | list[str] | tuple[str, ...],
    fan_in: int | Sequence[int] | None = None,
    *,
    connectivity: str | Sequence[Any] | Mapping[str, Any] = "learned",
    aggregation: str | Callable[[Sequence[Any], Tensor], Any] | None = None,
    align: Callable[[Tensor, Size], Tensor] | None = None,
    mask_init: str | float | None = None,
    seed: int = 0,
) -> nn.Module:
    """Let the blocks of a trained model learn which of the blocks before them to read.

        mc.rewire(vit, "encoder.layers", fan_in=2)

    The model is changed in place and returned; blocks, their names, weights and devices stay. A checkpoint of the old
    model loads, before or after. With `connectivity="prev"`, and in dense blocks with "full", the model computes what
    it did, to the bit.

    Args:
        model: any model.
        path: the name of an `nn.Sequential` or an `nn.ModuleList` of blocks that the model runs from first to last; ""
            for a model that is one itself. What the model hands from a block to the next may be read by all later ones
            too; what it does in between, and further arguments of the blocks, stay as they are.
            Or the name of a dense block of a DenseNet, whose layers then learn which features to read; or a list of
            names of dense blocks, each of which gets masks of its own, with seeds `seed`, `seed + 1`, ...; their
            `connectivity` may be a dict of wirings by name, such as `mc.wiring_of` returns.
        aggregation: as in `mc.MaskedStack`, by default "mean"; a dense block has "concat" and no other.
        mask_init: where the masks start, as in `mc.MaskedStack`: by default near the old wiring, because uniform masks
            wreck a trained network; of a dense block, which reads everything, uniform.
        fan_in, connectivity, align, seed: as in `mc.MaskedStack`.
    """
    containers = {name: _container(model, name) for name in (path if isinstance(path, list | tuple) else [path])}
    if any(map(is_dense_block, containers.values())):
        given: dict[str, Any] = {"aggregation": aggregation, "align": align, "mask_init": mask_init, "seed": seed}
        return rewire_dense_blocks(model, containers, fan_in, connectivity=connectivity, **given)
    if not isinstance(path, str):
        raise ConfigError(f"path is {shown(list(path))}; a list must name dense blocks, one or more, and nothing else.")
    container = containers[path]
    if isinstance(aggregation, str) and aggregation in ("residual", "stream"):
        raise ConfigError(
            f"aggregation is {aggregation!r}, which needs the residuals of blocks, and the blocks of {path!r} return "
            "whole outputs; use 'mean', 'sum' or 'scaled', or build the model with mc.MaskedStack."
        )
    # named_children would leave out a block that stands there twice
    named = {name: block for name, block in container._modules.items() if block is not None}
    stack = TappedStack(
        named,
        fan_in,
        connectivity=connectivity,
        aggregation="mean" if aggregation is None else aggregation,
        align=align,
        mask_init=CLOSE if mask_init is None else mask_init,
        seed=seed,
    )
    like = next((p for p in container.parameters() if p.is_floating_point()), None)
    if like is not None:
        stack.masks.to(like)
    for part in (stack, stack.masks):
        part.training = container.training  # but the blocks stay in the mode that they are in
    if path == "":
        return stack
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if part is container:  # perhaps under several names
            model.set_submodule(name, stack)
    return model


def _container(model: nn.Module, path: str) -> nn.Module:
    """The list of blocks at `path`, if a stack can take its place."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ConfigError(
            "DistributedDataParallel would not know of the masks, and they would differ from process to process; "
            "call mc.rewire(model.module, ...), then wrap it again."
        )
    if not isinstance(path, str):
        raise ConfigError(f"path is {path!r}; it must be the name of a list of blocks. {_hint(model)}")
    parts = dict(model.named_modules(remove_duplicate=False))
    found: nn.Module | None = parts.get(path)
    if found is None:
        near = difflib.get_close_matches(path, parts, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else _hint(model)
        raise ConfigError(f"there is no {path!r} in this {type(model).__name__}. {hint}")
    above = [parts[path[:end]] for end, letter in enumerate(path) if letter == "."]
    if isinstance(found, MaskedStack) or _is_inside(above, found):
        raise ConfigError(f"{path!r} is a MaskedStack already, or a part of one.")
    if is_dense_block(found):
        return found
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"{path!r} is a {type(found).__name__}; it must be an nn.Sequential or an nn.ModuleList. {_hint(model)}"
        )
    if path == "" and isinstance(found, nn.ModuleList):
        raise ConfigError("the model is itself an nn.ModuleList, which computes nothing; use mc.MaskedStack(model).")
    if len(found) < 2:
        raise ConfigError(f"{path!r} has {len(found)} blocks; to wire them anew takes at least 2.")
    for number, block in enumerate(found):
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"block {number} of {path!r} is a {type(block).__name__}, which computes nothing by itself."
            )
    own = type(found).forward not in (nn.Sequential.forward, nn.ModuleList.forward) or "forward" in vars(found)
    if own:
        raise ConfigError(
            f"{path!r} is a {type(found).__name__} with a forward of its own, which a stack would not run."
        )
    if found._forward_hooks or found._forward_pre_hooks or found._backward_hooks or found._backward_pre_hooks:
        raise ConfigError(f"{path!r} has hooks, which a stack in its place would not run; remove them before.")
    return found


def _is_inside(above: Sequence[nn.Module], found: nn.Module) -> bool:
    """Whether `found` is what a stack itself is made of, and not only inside of one of its blocks."""
    stacks = [part for part in above if isinstance(part, MaskedStack)]
    if not stacks:
        return False
    blocks = {id(part) for block in stacks[-1].flat() for part in block.modules()}
    return id(found) not in blocks or any(found is block for block in stacks[-1].flat())


def _hint(model: nn.Module) -> str:
    """Which dense blocks and lists of blocks a model has; lists inside of other lists, and of stacks, are left out."""
    names: list[str] = []
    taken: list[str] = []
    for name, part in model.named_modules():
        if is_dense_block(part):
            names.append(name)
            taken.append(name)
            continue
        if any(name.startswith(f"{other}." if other else "") for other in taken):
            continue
        if isinstance(part, MaskedStack):
            taken.append(name)
        elif isinstance(part, nn.Sequential | nn.ModuleList) and len(part) > 1:
            names.append(name)
            taken.append(name)
    return f"Lists of blocks in this model: {', '.join(map(repr, names)) or 'none'}."
