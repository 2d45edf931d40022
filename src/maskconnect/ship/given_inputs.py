"""The inputs of a network that is exported: their names, the axes that may grow, and inputs of other sizes.

An example is a tensor, a tuple of arguments, or a dict of arguments by name. Its tensors become the inputs of the file;
everything else in it (`use_cache=False`) is a constant of the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maskconnect.errors import ConfigError, shown, unknown_name
from maskconnect.pruning.prune import arguments_of

Axes = Mapping[str, Mapping[int, str]]
"""The names of the axes that may have any length, by input and place; axes of one name have one length."""


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """An example of the inputs of a network, in the order of the file."""

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    order: tuple[str, ...]  # the names of tensors and constants, as the example has them
    way: str  # how the network takes them: by "place", by "name", or as one "dict"
    axes: Axes
    images: bool  # whether it is a batch of images and nothing else

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the network, with these tensors as its inputs."""
        values = {**self.constants, **dict(zip(self.tensors, tensors, strict=True))}
        named = {name: values[name] for name in self.order}
        if self.way == "place":
            return tuple(named.values()), {}
        return ((), named) if self.way == "name" else ((named,), {})

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return tuple(self.tensors.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the named axes."""
        return {
            axis: self.tensors[name].shape[place] for name, axes in self.axes.items() for place, axis in axes.items()
        }

    def shapes(self) -> str:
        """The shapes of the tensors, for an error."""
        shapes = {name: "x".join(map(str, x.shape)) or "one number" for name, x in self.tensors.items()}
        return ", ".join(f"{name} of {shape}" for name, shape in shapes.items())

    def to_trace(self) -> GivenInputs:
        """The example with no named axis of length 1, which exporters take for a constant."""
        return self.resized({axis: max(2, n) for axis, n in self.sizes.items()})

    def others(self) -> Iterator[GivenInputs]:
        """Examples of the same size and of others: axes that are longer, shorter, and one entry long."""
        sizes = self.sizes
        wanted = [sizes, {axis: n + 1 + i for i, (axis, n) in enumerate(sizes.items())}]
        wanted.append({axis: max(1, n // 2) for axis, n in sizes.items()})
        wanted += [{**sizes, axis: 1} for axis in sizes]
        yield from map(self.resized, wanted)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call what runs a file: with the tensors in their order, or by name if the example has names."""
        return function(*self.values) if self.way == "place" else function(**self.tensors)

    def resized(self, sizes: Mapping[str, int]) -> GivenInputs:
        """An example with axes of these lengths: the same every time.

        A tensor of floating point that is the only input gets noise. All others get values of the example, so that ids
        stay ids: repeated, and shuffled along the axes, except masks, whose order matters.
        """
        generator = torch.Generator().manual_seed(sum(sizes.values()))
        alone = len(self.tensors) == 1
        tensors = {}
        for name, x in self.tensors.items():
            lengths = {place: sizes[axis] for place, axis in self.axes.get(name, {}).items()}
            if alone and x.is_floating_point():
                shape = [lengths.get(place, n) for place, n in enumerate(x.shape)]
                tensors[name] = torch.randn(shape, generator=generator).to(x.dtype)
                continue
            for place, length in lengths.items():
                chosen = torch.arange(length) % x.shape[place]
                if not _is_mask(x):
                    chosen = chosen[torch.randperm(length, generator=generator)]
                x = x.index_select(place, chosen)
            tensors[name] = x
        return replace(self, tensors=tensors)


def given_inputs(network: nn.Module, example: Any, dynamic: Axes | None) -> GivenInputs:
    """The inputs that an example stands for; an error if it has none, or if `dynamic` does not fit them."""
    images = isinstance(example, Tensor) and example.dim() == 4 and example.is_floating_point()
    args, kwargs = (example, {}) if isinstance(example, tuple) else arguments_of(network, example)
    way, named = "name", dict(kwargs)
    if args and isinstance(example, Mapping):
        way, named = "dict", dict(example)
    elif args:
        way, named = "place", dict(zip(["images"] if images else _names(network, len(args)), args, strict=True))
    tensors = {name: x.detach().cpu() for name, x in named.items() if isinstance(x, Tensor)}
    constants = {name: value for name, value in named.items() if name not in tensors}
    if not tensors:
        raise ConfigError("the example has no tensor; pass a tensor, a tuple of them, or a dict of them by name.")
    for name, value in constants.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise ConfigError(f"the input {shown(name)} is a {type(value).__name__} of tensors; pass each by itself.")
    for name in tensors:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(f"an input is called {shown(name)}; its name must be one that Python can have.")
    if dynamic is None:
        dynamic = {name: {0: "batch"} for name, x in tensors.items() if x.dim()}
    _check_axes(tensors, dynamic)
    return GivenInputs(tensors=tensors, constants=constants, order=tuple(named), way=way, axes=dynamic, images=images)


def _check_axes(tensors: Mapping[str, Tensor], dynamic: Axes) -> None:
    """Every named axis must be there and have entries, and those of one name must have one length."""
    first: dict[str, tuple[str, int]] = {}
    for name, axes in dynamic.items():
        if name not in tensors:
            raise unknown_name("a name in `dynamic`", name, tensors)
        shape = tensors[name].shape
        for place, axis in axes.items():
            if type(place) is not int or not 0 <= place < len(shape):
                last = f"axes 0 to {len(shape) - 1}" if shape else "no axes"
                raise ConfigError(f"`dynamic` names axis {shown(place)} of {name}, which has {last}.")
            if not shape[place]:
                raise ConfigError(f"axis {place} of {name} is empty; the example needs at least one entry.")
            other, length = first.setdefault(axis, (name, shape[place]))
            if length != shape[place]:
                raise ConfigError(
                    f"the axis {shown(axis)} has {length} entries in {other} and {shape[place]} in {name}; "
                    "axes of other lengths need other names in `dynamic`."
                )


def _names(network: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of a network."""
    names: list[str] = []
    for name, parameter in inspect.signature(network.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{number}" for number in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    if len(names) < count:
        raise ConfigError(f"the example has {count} arguments; the network takes {len(names)}.")
    return names[:count]


def _is_mask(x: Tensor) -> bool:
    """Whether a tensor has at most two values, such as 0 and 1, or 0 and minus infinity."""
    return len(torch.unique(x)) <= 2
