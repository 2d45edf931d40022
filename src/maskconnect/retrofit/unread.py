"""Find out whether a model uses the output of a block, other than passing it to the next block.

A block that no other block reads may be skipped only if the model does nothing else with its output. One pass shows
this. The output, and everything that the model computes from it, consists of watched tensors. They may be passed to the
next block, which does not read them. They must not exist any more when the last block runs, be used after that, be
written into another tensor, or influence control flow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from maskconnect.retrofit.stand_in import Form, Forms

METADATA_ATTRIBUTES = {"shape", "dtype", "device", "layout", "ndim", "is_nested", "is_cuda", "is_meta", "requires_grad"}
"""Attributes that do not depend on the values of a tensor."""
METADATA_METHODS = {
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
    "__len__",
    "__hash__",
    "stride",
    "is_contiguous",
}


@dataclass
class Watch:
    """The recorded uses of one output."""

    form: Form
    forms: Forms  # of the pass, for the decision
    absent: Callable[[], NoReturn] | None = None  # for a skipped block: what to do if the output is used
    used: bool = False
    changed: bool = False  # whether the model changed it for the next block
    over: bool = False  # whether the last block was reached
    left: bool = False  # whether a watched tensor still existed then, other than the input
    tensors: list[ReferenceType[Watched]] = field(default_factory=list)
    plain: list[ReferenceType[Tensor]] = field(default_factory=list)  # as the block returned them and hooks saw them

    def wrap(self, y: Any, form: Form) -> Any:
        """Return the same output with watched tensors; arguments of the block are not watched."""
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
        """Note that the model uses the output; for a skipped block, raise an error."""
        self.used = True
        if self.absent is not None:
            self.absent()

    def end(self, given: Any) -> None:
        """Note that the last block gets `given`: other tensors that still exist may be used elsewhere."""
        found = [tensor for handle in self.tensors if (tensor := handle()) is not None]
        self.over, self.left = True, any(tensor is not given for tensor in found)

    def unused(self, *, with_output: bool) -> bool:
        """Return whether, after the pass, nothing has used the output and nothing holds it.

        `with_output` says that the output of the model still exists. If it does not, the model may have returned a
        watched tensor that was then deleted, so no other tensor may have existed when the last block was reached.
        """
        handles = [*self.tensors, *(self.plain if with_output else ())]
        return not self.used and (with_output or not self.left) and all(handle() is None for handle in handles)


class Watched(Tensor):
    """A watched tensor; tensors that are computed from it are watched too."""

    watches: tuple[Watch, ...]
    handed: bool  # whether a block got it
    itself: bool  # whether it is the output of a block itself, not computed from it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the function to plain tensors, and watch the result."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if _reads_metadata(func):
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
    """Return the same tensor, watched."""
    found: Watched = y.as_subclass(Watched)
    found.watches, found.handed, found.itself = watches, False, False
    for watch in watches:
        watch.tensors.append(ref(found))
    return found


def _reads_metadata(func: Callable[..., Any]) -> bool:
    """Return whether a function reads only the metadata of a tensor, such as its shape."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in METADATA_ATTRIBUTES  # type: ignore[attr-defined]
    return name in METADATA_METHODS


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether a function writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or name.startswith("__i") or (name[-1:] == "_" != name[-2:-1])


def can_be_watched(y: Any) -> bool:
    """Return whether all tensors in an output are ordinary tensors."""
    tensors = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
    return all(type(leaf) is Tensor and not leaf.is_nested for leaf in tensors)


def handed(x: Any) -> Any:
    """Return a plain tensor for a watched one that a block gets as the output of the block before."""
    if not isinstance(x, Watched):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        x.handed = True
        for watch in x.watches:
            watch.changed |= not x.itself
        return x.as_subclass(Tensor)


def used(x: Any) -> Any:
    """Return a plain tensor for a watched one that a block gets as a further argument, which counts as a use."""
    if isinstance(x, Watched):
        for watch in x.watches:
            watch.use()
    return handed(x)


def tensors_kept_by(block: nn.Module) -> dict[tuple[int, str], int]:
    """Return the tensors among the attributes of a block, such as a loss that the model collects later."""
    parts = [(id(part), name, value) for part in block.modules() for name, value in vars(part).items()]
    return {(part, name): id(value) for part, name, value in parts if isinstance(value, Tensor)}
