"""Put masks into a model that already exists, with its trained weights (section 3.2, for anybody's network)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Size, Tensor, nn

from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError

CLOSE = 0.01
"""Where masks start in a trained network: every candidate a hundredth as likely as the next nearer one."""


def rewire(
    model: nn.Module,
    path: str,
    fan_in: int | Sequence[int] | None = None,
    *,
    connectivity: str | Sequence[Any] = "learned",
    aggregation: str | Callable[[Sequence[Any], Tensor], Any] = "mean",
    align: Callable[[Tensor, Size], Tensor] | None = None,
    mask_init: str | float = CLOSE,
    seed: int = 0,
) -> nn.Module:
    """Let the blocks of a trained model learn which of the blocks before them to read.

        mc.rewire(vit, "encoder.layers", fan_in=2)

    The model is changed in place and returned; its weights, their gradients, hooks and devices stay. Load a checkpoint
    of the old model before, not after: the names of the blocks in the `state_dict` change. With `connectivity="prev"`
    the model computes what it did, to the bit.

    Args:
        model: any model.
        path: the name of an `nn.Sequential`, or of an `nn.ModuleList` that the model runs from first to last, each
            block on the output of the one before; "" for a model that is one itself. A block may take further
            arguments; all blocks get those of the call.
        mask_init: where the masks start, as in `mc.MaskedStack`: near the old wiring, because uniform masks wreck a
            trained network.
        fan_in, connectivity, aggregation, align, seed: as in `mc.MaskedStack`.
    """
    container = _container(model, path)
    kind = MaskedStack if isinstance(container, nn.Sequential) else OnlyBlock
    stack = kind(
        list(container),
        fan_in,
        connectivity=connectivity,
        aggregation=aggregation,
        align=align,
        mask_init=mask_init,
        seed=seed,
    )
    like = next((p for p in container.parameters() if p.is_floating_point()), None)
    if like is not None:
        stack.masks.to(like)
    # What a model does with a list of modules it also does with a list of one.
    in_its_place = stack if isinstance(container, nn.Sequential) else nn.ModuleList([stack])
    for part in (in_its_place, stack, stack.blocks, stack.masks):
        part.training = container.training  # but the blocks stay in the mode that they are in
    if path == "":
        return stack
    model.set_submodule(path, in_its_place)
    return model


class OnlyBlock(MaskedStack):
    """The stack that stands alone in a list where blocks were: asked for what it has not, it answers as the first did.

    Models look at their first block (`self.layers[0].self_attn.batch_first` in torch's own transformer).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "blocks":
                raise
            return getattr(self.blocks[0], name)


def _container(model: nn.Module, path: str) -> nn.Sequential | nn.ModuleList:
    """The list of blocks at `path`, if a stack can take its place."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be an nn.Module.")
    if not isinstance(path, str):
        raise ConfigError(f"path is {path!r}; it must be the name of a list of blocks. {_lists(model)}")
    parts = dict(model.named_modules())
    if path not in parts:
        near = difflib.get_close_matches(path, parts, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else _lists(model)
        raise ConfigError(f"there is no {path!r} in this {type(model).__name__}. {hint}")
    found = parts[path]
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"{path!r} is a {type(found).__name__}; it must be an nn.Sequential or an nn.ModuleList. {_lists(model)}"
        )
    if path == "" and isinstance(found, nn.ModuleList):
        raise ConfigError("the model is itself an nn.ModuleList, which computes nothing; use mc.MaskedStack(model).")
    if len(found) < 2:
        raise ConfigError(f"{path!r} has {len(found)} blocks; to wire them anew takes at least 2.")
    if type(found).forward not in (nn.Sequential.forward, nn.ModuleList.forward):
        raise ConfigError(
            f"{path!r} is a {type(found).__name__} with a forward of its own, which a stack would not run."
        )
    if found._forward_hooks or found._forward_pre_hooks or found._backward_hooks or found._backward_pre_hooks:
        raise ConfigError(f"{path!r} has hooks, which a stack in its place would not run; remove them before.")
    return found


def _lists(model: nn.Module) -> str:
    """Which lists of blocks a model has; those inside of other lists are left out."""
    names: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in names)
        if isinstance(part, nn.Sequential | nn.ModuleList) and len(part) > 1 and not inside:
            names.append(name)
    return f"Lists of blocks in this model: {', '.join(map(repr, names)) or 'none'}."
