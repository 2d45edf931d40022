"""Put masks into a model that already exists, with its trained weights (section 3.2, for anybody's network)."""

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

CLOSE = 0.01
"""Where masks start in a trained network: every candidate a hundredth as likely as the next nearer one."""


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
    """Let the blocks of a trained model learn which of the blocks before them to read.

        mc.rewire(vit, "blocks", fan_in=2)
        mc.rewire(resnet, ["layer1", "layer2", "layer3", "layer4"], fan_in=2)

    The model is changed in place and returned. Blocks, their names, weights and devices stay. A checkpoint of the old
    model loads, before or after. With `connectivity="prev"`, and in dense blocks with "full", the model computes what
    it did, to the bit. Once frozen, a block that nothing reads is not run, unless the model itself uses its output;
    `mc.prune` removes it.

    Args:
        model: any model.
        path: the name of a list of blocks that the model runs from first to last: an `nn.Sequential`, an
            `nn.ModuleList`, or another module that runs its children in order; "" for a model that is one itself.
            Several names make one chain of several lists. What the model hands from one block to the next may be read
            by all later ones too; what it does in between, and further arguments of the blocks, stay as they are.
            Or the name of a dense block of a DenseNet, whose layers then learn which features to read; of several, each
            gets masks and a seed of its own, and `connectivity` may be a dict of wirings by name.
        aggregation: as in `mc.MaskedStack`, by default "mean"; a dense block has "concat". "residual" takes y - x for
            what a block adds to its input, so no `mc.Residual` is needed, and no ReLU follows; "stream" is unavailable.
        mask_init: where the masks start, as in `mc.MaskedStack`: by default near the old wiring, because uniform masks
            wreck a trained network; in a dense block, which reads everything, uniform.
        fan_in, wiring, connectivity, align, use_all, seed: as in `mc.MaskedStack`.
    """
    containers = _containers(model, path)
    if any(map(is_dense_block, containers)):
        blocks = dict(zip([path] if isinstance(path, str) else path, containers, strict=True))
        given: dict[str, Any] = {"aggregation": aggregation, "align": align, "mask_init": mask_init, "seed": seed}
        given |= {"wiring": wiring, "use_all": use_all}
        return rewire_dense_blocks(model, blocks, fan_in, connectivity=connectivity, **given)
    if isinstance(aggregation, str) and aggregation == "stream":
        raise ConfigError(
            "aggregation is 'stream', which needs blocks that return what they add to a stream; use 'residual', "
            "'mean', 'sum' or 'scaled', or build the model with mc.MaskedStack."
        )
    stack = TappedStack(
        containers,
        fan_in,
        wiring=wiring,
        connectivity=connectivity,
        aggregation="mean" if aggregation is None else aggregation,
        align=align,
        mask_init=CLOSE if mask_init is None else mask_init,
        use_all=use_all,
        seed=seed,
    )
    like = next((p for container in containers for p in container.parameters() if p.is_floating_point()), None)
    if like is not None:
        stack.masks.to(like)
    stack.masks.training = stack.training
    return replaced(model, dict(zip(containers, stack.sections, strict=True)))


def _containers(model: nn.Module, path: str | Sequence[str]) -> list[nn.Module]:
    """The lists of blocks at `path`, or at several, if a chain can take their place."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ConfigError(
            "DistributedDataParallel would not know of the masks, and they would differ from process to process; "
            "call mc.rewire(model.module, ...), then wrap it again."
        )
    paths = [path] if isinstance(path, str) else path
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(one, str) for one in paths):
        raise ConfigError(f"path is {path!r}; it must be the name of a list of blocks, or several. {_hint(model)}")
    found = [_container(model, one) for one in paths]
    for one, container in zip(paths, found, strict=True):
        inside = [other for other in found if other is not container and other in container.modules()]
        if found.count(container) > 1 or inside:
            raise ConfigError(f"{one!r} is named twice, or has another of the lists in it; name each list once.")
    blocks = sum(len(container._modules) for container in found)
    if blocks < 2:
        raise ConfigError(f"{path!r} has {blocks} blocks; at least 2 are needed.")
    return found


def _container(model: nn.Module, path: str) -> nn.Module:
    """The list of blocks at `path`, if a stack can take its place."""
    parts = dict(model.named_modules(remove_duplicate=False))
    found: nn.Module | None = parts.get(path)
    if found is None:
        near = difflib.get_close_matches(path, parts, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else _hint(model)
        raise ConfigError(f"there is no {path!r} in this {type(model).__name__}. {hint}")
    above = [parts[path[:end]] for end, letter in enumerate(path) if letter == "."]
    if isinstance(found, MaskedStack | TapList) or _is_inside(above, found):
        raise ConfigError(f"{path!r} is a MaskedStack already, or a part of one.")
    if is_dense_block(found):
        return found
    listed = isinstance(found, nn.Sequential | nn.ModuleList)
    if not listed:
        _check_children(found, path, _hint(model))
    if path == "" and not isinstance(found, nn.Sequential):
        raise ConfigError(
            f"the model is itself an {'nn.ModuleList, which computes nothing' if listed else 'other module'}; "
            "use mc.MaskedStack(model)."
        )
    for number, block in enumerate(found._modules.values()):
        if block is None or type(block).forward is nn.ModuleList.forward:
            raise ConfigError(
                f"block {number} of {path!r} is a {type(block).__name__}, which computes nothing by itself."
            )
    if "forward" in vars(found):
        raise ConfigError(f"{path!r} has had its forward replaced by another, which a stack would not run.")
    return found


def _check_children(found: nn.Module, path: str, hint: str) -> None:
    """A module that is not a list may run its children one after the other; that they are alike speaks for it."""
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
    """Whether `found` is what a stack itself is made of, and not only inside of one of its blocks."""
    stacks = [part for part in above if isinstance(part, MaskedStack | TapList)]
    if not stacks:
        return False
    own = stacks[-1].flat() if isinstance(stacks[-1], MaskedStack) else stacks[-1].blocks_here()
    blocks = {id(part) for block in own for part in block.modules()}
    return id(found) not in blocks or any(found is block for block in own)


def _hint(model: nn.Module) -> str:
    """Which lists of blocks a model has; those inside of other lists, and of stacks, are left out."""
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
