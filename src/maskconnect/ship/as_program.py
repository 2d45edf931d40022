"""A network as a function from named tensors to named tensors, as exporters need it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from maskconnect.errors import ConfigError
from maskconnect.ship.given_inputs import GivenInputs

CACHES = ("past_key_values", "cache_params")
"""Outputs of language models that speed up the next call; exported networks do not return them."""


class AsProgram(nn.Module):
    """Run a network on the inputs of a file, and return its outputs: a tensor, or a tuple or dict of tensors.

    Arguments are tensors, in the order of the file or by name.
    """

    def __init__(self, network: nn.Module, given: GivenInputs) -> None:
        super().__init__()
        self.network, self.given = network, given
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(name, kind) for name in given.tensors])

        def forward(*args: Tensor, **kwargs: Tensor) -> Any:
            return self.run(tuple(self.signature.bind(*args, **kwargs).arguments.values()))

        vars(forward)["__signature__"] = self.signature  # exporters read the names of the inputs
        self.forward = forward

    def run(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the outputs."""
        self._bind_axes(dict(zip(self.given.tensors, tensors, strict=True)))
        args, kwargs = self.given.arguments(tensors)
        return only_tensors(self.network(*args, **kwargs))

    def _bind_axes(self, tensors: Mapping[str, Tensor]) -> None:
        """Tell exporters that axes of one name have one length."""
        first: dict[str, int] = {}
        for name, axes in self.given.axes.items():
            for place, axis in axes.items():
                length = tensors[name].shape[place]
                torch._check(first.setdefault(axis, length) == length)  # type: ignore[no-untyped-call]


def only_tensors(y: Any) -> Any:
    """Return the tensors of an output; mappings become plain dicts with flat names."""
    if isinstance(y, Tensor):
        return y
    return named_outputs(y) if isinstance(y, Mapping) else tuple(named_outputs(y).values())


def named_outputs(y: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by name: the keys of a dict, else output_0, output_1 and so on."""
    found = _flat(y, "")
    if isinstance(y, Mapping):
        if len(dict(found)) < len(found):
            names = ", ".join(name for name, _ in found)
            raise ConfigError(f"two outputs of the network would have the same name: {names}. Rename one.")
        return dict(found)
    return {f"output_{number}": x for number, (_, x) in enumerate(found)}


def _flat(y: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(y, Tensor):
        return [(name, y)]
    items: list[tuple[Any, Any]] = []
    if isinstance(y, Mapping):
        items = [(key, value) for key, value in y.items() if key not in CACHES]
    elif isinstance(y, tuple | list):
        items = list(enumerate(y))
    return [found for key, value in items for found in _flat(value, f"{name}_{key}" if name else str(key))]


def program_of(network: nn.Module, given: GivenInputs) -> ExportedProgram:
    """Return the program that torch.export traces, for named axes of any length."""
    traced = given.to_trace()
    dynamic = {name: dict.fromkeys(given.axes.get(name, {}), Dim.DYNAMIC) for name in given.tensors}
    if given.images:
        return torch.export.export(network, traced.values, dynamic_shapes=tuple(dynamic.values()), strict=False)
    by_name = given.way != "place"
    return torch.export.export(
        AsProgram(network, given),
        () if by_name else traced.values,
        dict(traced.tensors) if by_name else None,
        dynamic_shapes=dynamic,
        strict=False,
    )
