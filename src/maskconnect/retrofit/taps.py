"""A list that replaces a list of blocks in a model, with each block behind a tap.

Blocks keep their names, so checkpoints still load. The list is still an instance of the class of the container, with
its attributes and hooks, and runs the forward of the container, if it has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from maskconnect.errors import ConfigError, ConnectivityError
from maskconnect.retrofit.given import Given
from maskconnect.retrofit.walker import Walker

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
MUTATING_METHODS = ("append", "extend", "insert", "pop", "update", "clear", "__setitem__", "__delitem__", "__iadd__")
"""The methods that would change a list of blocks after its masks were built."""


class Tap(nn.Module):
    """One block of a chain, as the model sees it: everything except for a call goes to the block itself."""

    def __init__(self, walker: Walker, number: int, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.__dict__["_place"] = walker, number  # not a child module: lists hold blocks, not the reverse

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block in its chain."""
        walker, number = self._place
        if walker.reads_prev():
            return self.block(*args, **kwargs)
        return walker.run(number, self.block, Given.to(self.block, args, kwargs))

    @property
    def training(self) -> bool:
        """Whether the block is in train mode."""
        return self.block.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in self.__dict__ and "block" in self._modules:
            self.block.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "block":
                raise
            return getattr(self.block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("block", "training"):
            super().__setattr__(name, value)
        else:
            setattr(self.block, name, value)


skip_code(Tap.forward.__code__)  # see `Walker.run`


class TapList(nn.Module):
    """A list of blocks, each behind a tap."""

    never_traced = True  # pruning calls it instead of tracing it

    def take_place_of_(self, container: nn.Module, walker: Walker, first: int) -> None:
        """Replace a container; its blocks are the blocks of a chain from number `first` on."""
        self._kind, self._block_names = type(container), tuple(container._modules)
        own = [name for name in vars(container) if name not in MODULE_ATTRIBUTES]
        self._container_holds = own, tuple(container._parameters), tuple(container._buffers)
        for name in (*self._block_names, *container._parameters, *container._buffers, *own):
            if hasattr(self, name):
                what = "a block" if name in self._block_names else "an attribute of the list"
                raise ConfigError(f"{what} is called {name!r}, a name that the stack reserves; rename it.")
        for name, value in vars(container).items():
            if name in ("_parameters", "_buffers"):
                getattr(self, name).update(value)
            elif name not in MODULE_ATTRIBUTES or "hook" in name:
                self.__dict__[name] = value
        self._non_persistent_buffers_set = self._non_persistent_buffers_set | container._non_persistent_buffers_set
        self._modules.update(container._modules)
        self._taps = [Tap(walker, number, block) for number, block in enumerate(self.blocks_here(), start=first)]
        self.training = container.training
        kinds: tuple[Any, Any] = type(self), self._kind
        self.__class__ = tapped(*kinds)

    def blocks_here(self) -> list[nn.Module]:
        """Return the blocks of this list."""
        return [cast(nn.Module, self._modules[name]) for name in self._block_names]

    def container(self, blocks: Mapping[str, nn.Module]) -> nn.Module:
        """Return a container like the original one, with these blocks."""
        made = self._kind.__new__(self._kind)
        own, parameters, buffers = self._container_holds
        made.__dict__.update({name: vars(self)[name] for name in (*MODULE_ATTRIBUTES, *own)}, _modules=dict(blocks))
        made._parameters = {name: self._parameters[name] for name in parameters}
        made._buffers = {name: self._buffers[name] for name in buffers}
        return made

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Replace a block by another."""
        super().add_module(name, module)
        self._refresh_taps()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_block_names", ()):
            self._refresh_taps()

    def _refresh_taps(self) -> None:
        for tap, block in zip(self.__dict__.get("_taps", ()), self.blocks_here(), strict=True):
            tap.block = block

    def children(self) -> Iterator[nn.Module]:
        """Return the taps, because the forward of a container may run its children."""
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._taps) if torch.compiler.is_compiling() else self._in_turn()

    def _in_turn(self) -> Iterator[nn.Module]:
        walker, first = self._taps[0]._place
        if first == 0:
            walker.passes.looping = True
        yield from self._taps
        walker.passes.looping = False  # if no block ran, the loop had another purpose

    def __getitem__(self, place: Any) -> Any:
        return TapSlice(self._taps[place]) if isinstance(place, slice) else self._taps[place]

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ConnectivityError("nn.DataParallel cannot copy a rewired list; use DistributedDataParallel (torchrun).")

    def __reduce__(self) -> tuple[Any, ...]:
        kind = (vars(type(self))["base"], self._kind) if "base" in vars(type(self)) else (type(self), None)
        return _empty, kind, self.__getstate__()  # type: ignore[no-untyped-call]


class TapSlice(list[nn.Module]):
    """A slice of the taps, which can be called like a slice of an `nn.Sequential`."""

    def __call__(self, x: Any) -> Any:
        """Run the taps in order."""
        for tap in self:
            x = tap(x)
        return x


class NamedTaps:
    """A base class for containers with their own forward, which may call blocks by name."""

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("_block_names", ())
        return self._taps[names.index(name)] if name in names else super().__getattr__(name)  # type: ignore[misc]


@cache
def tapped(base: Any, kind: Any) -> Any:
    """Return the class of a list that replaces a container of class `kind`."""

    def refuse(self: nn.Module, *_: Any, **__: Any) -> None:
        raise ConnectivityError(
            "this list has masks for the blocks that it had when it was rewired. Change it before mc.rewire."
        )

    own: dict[str, Any] = {name: refuse for name in MUTATING_METHODS if hasattr(kind, name)}
    own |= {"base": base, "forward": kind.forward, "__repr__": nn.Module.__repr__, "__module__": base.__module__}
    listed = kind.forward in (nn.Sequential.forward, nn.ModuleList.forward)
    bases = (base, kind) if listed else (NamedTaps, base, kind)
    return type(f"Tapped{kind.__name__}", bases, own)


def _empty(base: Any, kind: Any) -> Any:
    """Return an empty instance, for copies."""
    made = base if kind is None else tapped(base, kind)
    return made.__new__(made)
