"""`mc.rewire`: add masks to an existing model and keep its trained weights (section 3.2, for any network)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.lookup import replaced
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError
from maskconnect.retrofit.dense_block import is_dense_block, rewire_dense_blocks
from maskconnect.retrofit.stack import TappedStack
from maskconnect.retrofit.taps import TapList

NEAR_OLD_WIRING = 0.01
"""The default `mask_init` in a trained network: each candidate is a hundredth as likely as the next nearer one."""


def rewire(
    model: nn.Module,
    path: str | Sequence[str],
    fan_in: int | Sequence[int] | None = None,
    *,
    wiring: Sequence[Any] | None = None,
    connectivity: str | Sequence[Any] | Mapping[str, Any] = "learned",
    aggregation: str | Callable[[Sequence[Any], Tensor], Any] | None = None,
    align: str | Callable[[Tensor, Size], Tensor | None] | None = None,
    mask_init: str | float | None = None,
    use_all: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Let the blocks of an existing model learn which of the blocks before them to read.

    The model changes in place and is returned. Blocks keep their names, weights and devices, and checkpoints of the
    old model still load. With `connectivity="prev"` (in dense blocks, "full"), the outputs are bitwise identical to
    those before. Once masks are frozen, a block that nothing reads does not run, unless the model itself uses its
    output; `mc.prune` removes such blocks.

    Args:
        model: any model.
        path: the name of a list of blocks that the model runs in order: an `nn.Sequential`, an `nn.ModuleList`, or
            another module that runs its children in order; "" if the model itself is one. Several names form one chain.
            Each block may read what the model passes to any earlier block; further arguments, and what the model
            computes between blocks, stay the same. A path may also name a dense block of a DenseNet, whose layers then
            learn which features to read; several dense blocks get separate masks and seeds.
        fan_in: K, the number of sources per block; see `mc.MaskedStack`.
        wiring: the candidate sources of each block; None (default) for all blocks before it.
        connectivity: "learned" (default), "prev", "full", "random" or an explicit wiring; see `mc.MaskedStack`. For
            several dense blocks, it may be a dict of wirings by path.
        aggregation: how sources are joined; see `mc.MaskedStack`. None (default) means "mean", or "concat" in a dense
            block. "residual" uses y - x as the residual of a block, needs no `mc.Residual`, and applies no ReLU.
            "stream" is unavailable.
        align: how sources are brought to the same shape; see `mc.MaskedStack`.
        mask_init: the initial real masks; see `mc.MaskedStack`. None (default) starts near the old wiring (0.01),
            because uniform masks destroy a trained network; in a dense block, it means "uniform".
        use_all: whether another block must read each block; False by default.
        seed: the seed of draws and of random connectivity; 0 by default.

    Returns:
        The same model.

    Raises:
        ConfigError: if `path` does not name a list of blocks, or an argument is invalid.
        ConnectivityError: if a wiring does not fit the blocks.

    Example:
        ```python
        mc.rewire(vit, "blocks", fan_in=2)
        mc.rewire(resnet, ["layer1", "layer2", "layer3", "layer4"], fan_in=2)
        ```
    """
    containers = _containers(model, path)
    if any(map(is_dense_block, containers)):
        blocks = dict(zip([path] if isinstance(path, str) else path, containers, strict=True))
        given: dict[str, Any] = {"aggregation": aggregation, "align": align, "mask_init": mask_init, "seed": seed}
        given |= {"wiring": wiring, "use_all": use_all}
        return rewire_dense_blocks(model, blocks, fan_in, connectivity=connectivity, **given)
    if isinstance(aggregation, str) and aggregation == "stream":
        raise ConfigError(
            "aggregation is 'stream', which needs blocks that return what they add to a stream. Use 'residual', "
            "'mean', 'sum' or 'scaled', or build the model with mc.MaskedStack."
        )
    stack = TappedStack(
        containers,
        fan_in,
        wiring=wiring,
        connectivity=connectivity,
        aggregation="mean" if aggregation is None else aggregation,
        align=align,
        mask_init=NEAR_OLD_WIRING if mask_init is None else mask_init,
        use_all=use_all,
        seed=seed,
    )
    like = next((p for container in containers for p in container.parameters() if p.is_floating_point()), None)
    if like is not None:
        stack.masks.to(like)
    stack.masks.training = stack.training
    return replaced(model, dict(zip(containers, stack.sections, strict=True)))


def _containers(model: nn.Module, path: str | Sequence[str]) -> list[nn.Module]:
    """Return the lists of blocks at one or several paths; raise an error if they cannot be rewired."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which would not synchronize the new masks; "
            "call mc.rewire(model.module, ...), then wrap the result again."
        )
    paths = [path] if isinstance(path, str) else path
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(one, str) for one in paths):
        raise ConfigError(f"path is {path!r}; it must be the name of a list of blocks, or several. {_hint(model)}")
    found = [_container(model, one) for one in paths]
    for one, container in zip(paths, found, strict=True):
        inside = [other for other in found if other is not container and other in container.modules()]
        if found.count(container) > 1 or inside:
            raise ConfigError(f"{one!r} is named twice, or contains another of the named lists; name each list once.")
    blocks = sum(len(container._modules) for container in found)
    if blocks < 2:
        raise ConfigError(f"{path!r} has {blocks} blocks; it needs at least 2.")
    return found


def _container(model: nn.Module, path: str) -> nn.Module:
    """Return the list of blocks at `path`; raise an error if it cannot be rewired."""
    parts = dict(model.named_modules(remove_duplicate=False))
    found: nn.Module | None = parts.get(path)
    if found is None:
        near = difflib.get_close_matches(path, parts, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else _hint(model)
        raise ConfigError(f"there is no {path!r} in this {type(model).__name__}. {hint}")
    above = [parts[path[:end]] for end, letter in enumerate(path) if letter == "."]
    if isinstance(found, MaskedStack | TapList) or _is_inside(above, found):
        raise ConfigError(f"{path!r} is already a MaskedStack, or part of one; rewire it only once.")
    if is_dense_block(found):
        return found
    listed = isinstance(found, nn.Sequential | nn.ModuleList)
    if not listed:
        _check_children(found, path, _hint(model))
    if path == "" and not isinstance(found, nn.Sequential):
        raise ConfigError(
            f"path is '', but the model is a {type(found).__name__}, not an nn.Sequential; "
            "name a list of blocks in it, or use mc.MaskedStack."
        )
    for number, block in enumerate(found._modules.values()):
        if block is None or type(block).forward is nn.ModuleList.forward:
            raise ConfigError(
                f"block {number} of {path!r} is a {type(block).__name__}, which computes nothing by itself; every "
                "block must be a module that can be called."
            )
    if "forward" in vars(found):
        raise ConfigError(
            f"the forward of {path!r} was replaced, and a stack would not run the new one. Restore it first: delete "
            "the attribute `forward` of this module."
        )
    return found


def _check_children(found: nn.Module, path: str, hint: str) -> None:
    """Raise an error unless all children are of one class, a sign that the module runs them in order."""
    kinds = {type(child) for child in found.children()}
    if len(kinds) == 1 and not isinstance(found, nn.ModuleDict):
        return
    if isinstance(found, nn.ModuleDict):
        why = "does not say in which order its blocks run"
    elif len(kinds) > 1:
        why = "has children of different classes, so it is not a chain of blocks"
    else:
        why = "has no blocks"
    raise ConfigError(
        f"{path!r} is a {type(found).__name__}, which {why}; it must be an nn.Sequential, an nn.ModuleList, or another "
        f"module that runs its children in order. {hint}"
    )


def _is_inside(above: Sequence[nn.Module], found: nn.Module) -> bool:
    """Return whether `found` is a block or a list of a stack, not only a module inside one of its blocks."""
    stacks = [part for part in above if isinstance(part, MaskedStack | TapList)]
    if not stacks:
        return False
    own = stacks[-1].flat() if isinstance(stacks[-1], MaskedStack) else stacks[-1].blocks_here()
    blocks = {id(part) for block in own for part in block.modules()}
    return id(found) not in blocks or any(found is block for block in own)


def _hint(model: nn.Module) -> str:
    """Name the lists of blocks in a model, without those inside other lists or stacks."""
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
        elif isinstance(part, nn.Sequential | nn.ModuleList) and not isinstance(part, TapList) and len(part) > 1:
            names.append(name)
            taken.append(name)
    return f"Lists of blocks in this model: {', '.join(map(repr, names)) or 'none'}."
