"""The inputs of a network to export: their names, their axes of any length, and inputs of other sizes.

An example is a tensor, a tuple of arguments, or a dict of arguments by name. Its tensors become the inputs of the file;
other values (`use_cache=False`) become constants of the file.
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
"""The names of the axes of any length, by input and position; axes with the same name have the same length."""


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """Example inputs of a network, in the order of the file."""

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    order: tuple[str, ...]  # the names of tensors and constants, in the order of the example
    way: str  # how they are passed: by "place", by "name", or as one "dict"
    axes: Axes
    images: bool  # whether the only input is a batch of images

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the network, with these tensors as its inputs."""
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
        """Return the shapes of the tensors, for errors."""
        shapes = {name: "x".join(map(str, x.shape)) or "one number" for name, x in self.tensors.items()}
        return ", ".join(f"{name} of {shape}" for name, shape in shapes.items())

    def to_trace(self) -> GivenInputs:
        """Return the example without named axes of length 1, which exporters treat as constants."""
        return self.resized({axis: max(2, n) for axis, n in self.sizes.items()})

    def others(self) -> Iterator[GivenInputs]:
        """Yield examples of the same size and of others: with longer and shorter axes, and with axes of length 1."""
        sizes = self.sizes
        wanted = [sizes, {axis: n + 1 + i for i, (axis, n) in enumerate(sizes.items())}]
        wanted.append({axis: max(1, n // 2) for axis, n in sizes.items()})
        wanted += [{**sizes, axis: 1} for axis in sizes]
        yield from map(self.resized, wanted)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function that runs a file: by position, or by name if the example has names."""
        return function(*self.values) if self.way == "place" else function(**self.tensors)

    def resized(self, sizes: Mapping[str, int]) -> GivenInputs:
        """Return an example with axes of these lengths, the same every time.

        A single floating-point input gets noise. Other inputs get values of the example, repeated and shuffled along
        the axes, so that ids stay valid. Masks are not shuffled, because their order matters.
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
    """Return the inputs of an example; an error if it has no tensor, or if `dynamic` does not fit."""
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
            raise ConfigError(
                f"the input {shown(name)} is a {type(value).__name__} of tensors; pass each tensor as its own input."
            )
    for name in tensors:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(f"an input is named {shown(name)}; the name must be a valid Python identifier.")
    if dynamic is None:
        dynamic = {name: {0: "batch"} for name, x in tensors.items() if x.dim()}
    _check_axes(tensors, dynamic)
    return GivenInputs(tensors=tensors, constants=constants, order=tuple(named), way=way, axes=dynamic, images=images)


def _check_axes(tensors: Mapping[str, Tensor], dynamic: Axes) -> None:
    """Raise an error unless named axes exist, are not empty, and have one length per name."""
    first: dict[str, tuple[str, int]] = {}
    for name, axes in dynamic.items():
        if name not in tensors:
            raise unknown_name("a name in `dynamic`", name, tensors)
        shape = tensors[name].shape
        for place, axis in axes.items():
            if type(place) is not int or not 0 <= place < len(shape):
                last = f"axes 0 to {len(shape) - 1}" if shape else "no axes"
                raise ConfigError(f"`dynamic` names axis {shown(place)} of {name}, which has {last}. Fix or remove it.")
            if not shape[place]:
                raise ConfigError(f"axis {place} of {name} is empty; the example needs at least one entry.")
            other, length = first.setdefault(axis, (name, shape[place]))
            if length != shape[place]:
                raise ConfigError(
                    f"the axis {shown(axis)} has {length} entries in {other} and {shape[place]} in {name}; "
                    "axes of different lengths need different names in `dynamic`."
                )


def _names(network: nn.Module, count: int) -> list[str]:
    """Return the names of the first arguments of a network."""
    names: list[str] = []
    for name, parameter in inspect.signature(network.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{number}" for number in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    if len(names) < count:
        raise ConfigError(f"the example has {count} arguments; the network takes {len(names)}. Pass that number.")
    return names[:count]


def _is_mask(x: Tensor) -> bool:
    """Return whether a tensor has at most two values, such as 0 and 1, or 0 and minus infinity."""
    return len(torch.unique(x)) <= 2
