"""The arguments of a call of a block: the tensor from the block before, and further arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from maskconnect.errors import ConnectivityError
from maskconnect.retrofit.unread import handed, used


@dataclass(frozen=True)
class Given:
    """The arguments of one call of a block; the first is the output of the block before."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first: int | str  # the position or the name of the first argument
    held: Any = None  # the first argument as the model has it, which may be a watched tensor

    @classmethod
    def to(cls, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        """Return the arguments of a call of `block`."""
        if args:
            return cls((_plain(args[0], handed), *(_plain(a, used) for a in args[1:])), _named(kwargs), 0, args[0])
        first = next(iter(inspect.signature(block.forward).parameters), "")
        if first not in kwargs:
            raise ConnectivityError(f"a {type(block).__name__} was called without its argument {first!r}; pass it.")
        x = _plain(kwargs[first], handed)
        return cls((), {**_named({**kwargs, first: None}), first: x}, first, kwargs[first])

    @property
    def x(self) -> Any:
        """The first argument: a tensor, or a container with a tensor in it."""
        return self.args[0] if self.first == 0 else self.kwargs[str(self.first)]

    @property
    def main(self) -> Any:
        """The first floating-point tensor in x; x itself if there is none."""
        if isinstance(self.x, Tensor):
            return self.x
        leaves = tree_flatten(self.x)[0]
        return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), self.x)

    @property
    def arguments(self) -> dict[str | int, Any]:
        """All arguments except for the first, by position or name; plus the items of x if it is a tuple or list."""
        named: dict[str | int, Any] = dict(enumerate(self.args))
        named.update(self.kwargs.items())
        items = enumerate(self.x) if type(self.x) in (tuple, list) else ()
        inside = {f"item {i}": item for i, item in items}
        return {name: value for name, value in named.items() if name != self.first} | inside

    def reading(self, y: Any) -> Given:
        """Return the same arguments with y instead of x, or instead of the tensor in x."""
        x = y
        if not isinstance(self.x, Tensor) and isinstance(y, Tensor):
            leaves, tree = tree_flatten(self.x)
            x = tree_unflatten([y if leaf is self.main else leaf for leaf in leaves], tree)
        if self.first == 0:
            return Given((x, *self.args[1:]), self.kwargs, 0)
        return Given(self.args, {**self.kwargs, str(self.first): x}, self.first)

    def call(self, block: nn.Module) -> Any:
        """Call a block with these arguments."""
        return block(*self.args, **self.kwargs)


def _plain(x: Any, plain: Callable[[Any], Any]) -> Any:
    """Return x with plain tensors instead of watched ones; x itself if it has none."""
    if type(x) is dict:
        items = {key: _plain(value, plain) for key, value in x.items()}
        return items if any(items[key] is not x[key] for key in x) else x
    if type(x) in (tuple, list):
        values = [_plain(item, plain) for item in x]
        return type(x)(values) if any(a is not b for a, b in zip(values, x, strict=True)) else x
    return plain(x)


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value, used) for name, value in kwargs.items()}
