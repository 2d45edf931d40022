"""Find out whether a model itself uses the output of a block, beside handing it to the next one.

A block that no other block reads may be left out only if the model does nothing else with its output. One pass shows
that. The output is handed out as tensors that are watched, and so is all that the model computes from them. They may
end in the next block, which does not read them. They must not be left when the last block runs, or be computed with
after that, or be written into a tensor, or decide anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from maskconnect.retrofit.stand_in import Form

LOOKS = {"shape", "dtype", "device", "layout", "ndim", "is_nested", "is_cuda", "is_meta", "requires_grad"}
"""Attributes that say nothing about the values of a tensor."""
LOOKING = {"size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "__hash__", "stride", "is_contiguous"}


@dataclass
class Watch:
    """What became of one output."""

    form: Form
    absent: Callable[[], NoReturn] | None = None  # of a block that was left out: what to do if it is used
    used: bool = False
    changed: bool = False  # whether the model computed something of it for the next block
    over: bool = False  # whether the last block has been reached
    left: bool = False  # whether there was something then that no block was given
    tensors: list[ReferenceType[Watched]] = field(default_factory=list)
    plain: list[ReferenceType[Tensor]] = field(default_factory=list)  # as the block returned them, and hooks saw them

    def wrap(self, y: Any, form: Form) -> Any:
        """The same output, with tensors that are watched; what the block was given itself is not."""
        if form["kind"] in ("tuple", "list"):
            return type(y)(self.wrap(*pair) for pair in zip(y, form["items"], strict=True))
        if form["kind"] == "dict":
            return {key: self.wrap(y[key], item) for key, item in zip(y, form["items"], strict=True)}
        if not isinstance(y, Tensor) or form["kind"] == "argument":
            return y
        self.plain.append(ref(y))
        found = watched(y, (self,))
        found.itself = True
        return found

    def use(self) -> None:
        """Note that the model uses the output; of a block that was left out there is none."""
        self.used = True
        if self.absent is not None:
            self.absent()

    def end(self, given: Any) -> None:
        """The last block is given something: whatever else is left may be for another use."""
        found = [tensor for handle in self.tensors if (tensor := handle()) is not None]
        self.over, self.left = True, any(tensor is not given for tensor in found)

    def unused(self, *, with_output: bool) -> bool:
        """Whether, after the pass, nobody has used the output, and nobody holds it.

        `with_output` says that what the model returned is still there. Otherwise something of this output may have been
        returned and dropped, so nothing may have been left when the last block was reached.
        """
        handles = [*self.tensors, *(self.plain if with_output else ())]
        return not self.used and (with_output or not self.left) and all(handle() is None for handle in handles)


class Watched(Tensor):
    """A tensor that is watched, and so is what is computed from it."""

    watches: tuple[Watch, ...]
    handed: bool  # whether a block was given it
    itself: bool  # whether it is what a block returned, and not computed from that

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what was asked for with plain tensors, and watch what comes out."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if _only_looks(func):
                return result
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Watched)]
            watches = tuple({id(watch): watch for leaf in given for watch in leaf.watches}.values())
            tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
            escapes = not tensors or _writes(func) or "out" in kwargs
            for watch in watches:
                if watch.over or escapes:
                    watch.use()
            return tree_map(lambda y: watched(y, watches) if type(y) is Tensor else y, result)


def watched(y: Tensor, watches: tuple[Watch, ...]) -> Watched:
    """The same tensor, watched."""
    found: Watched = y.as_subclass(Watched)
    found.watches, found.handed, found.itself = watches, False, False
    for watch in watches:
        watch.tensors.append(ref(found))
    return found


def _only_looks(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in LOOKING or (name == "__get__" and getattr(func.__self__, "__name__", "") in LOOKS)  # type: ignore[attr-defined]


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or name.startswith("__i") or (name[-1:] == "_" != name[-2:-1])


def can_be_watched(y: Any) -> bool:
    """Whether all tensors in an output are ordinary ones."""
    tensors = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
    return all(type(leaf) is Tensor and not leaf.is_nested for leaf in tensors)


def handed(x: Any) -> Any:
    """A plain tensor where a block is given one that is watched, in the place of the block before's output."""
    if not isinstance(x, Watched):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        x.handed = True
        for watch in x.watches:
            watch.changed |= not x.itself
        return x.as_subclass(Tensor)


def used(x: Any) -> Any:
    """A plain tensor where a block is given one that is watched, as a further argument: a use."""
    if isinstance(x, Watched):
        for watch in x.watches:
            watch.use()
    return handed(x)


def tensors_kept_by(block: nn.Module) -> dict[tuple[int, str], int]:
    """The tensors that a block has as plain attributes, such as a loss that it leaves for the model to collect."""
    parts = [(id(part), name, value) for part in block.modules() for name, value in vars(part).items()]
    return {(part, name): id(value) for part, name, value in parts if isinstance(value, Tensor)}
