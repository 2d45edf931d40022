"""What the modules of a stack have returned in a forward pass, in the shapes that their readers need (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Size, Tensor

from maskconnect.core.align import align, leads_through
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConnectivityError

Shapes = list[Size | None]
"""The output shape of every module; None of what is not a tensor, and of nested tensors."""


@dataclass
class Outputs:
    """The outputs of the modules that have run so far."""

    layout: Layout
    user_align: Callable[[Tensor, Size], Tensor] | None
    only_tensors: bool  # the built-in aggregations add, so they need tensors
    known: Shapes | None  # from an earlier pass, for modules that this one does not run
    found: list[Any] = field(default_factory=list)
    aligned: dict[int, list[Tensor]] = field(default_factory=dict)  # each source in the other shapes asked for so far

    def append(self, y: Any) -> None:
        """The next module returned y."""
        self.found.append(y)

    def skip(self) -> None:
        """The next module need not run."""
        self.found.append(None)

    def last(self) -> Any:
        """What the last module returned."""
        return self.found[-1]

    def shapes(self) -> Shapes:
        """Of all outputs, once every module has run."""
        return [_shape(y) for y in self.found]

    def source(self, k: int, like: int, target: int | None = None) -> Any:
        """The output of module k in the shape of module `like`'s, for `target` (None: the output of the stack)."""
        y = self.found[k]
        if not isinstance(y, Tensor):
            if self.only_tensors:
                raise ConnectivityError(
                    f"{self.layout.name(k)} returned a {type(y).__name__}; built-in aggregations need tensors. "
                    "Pass aggregation=fn(sources, mask)."
                )
            return y
        shape = self._shape_of(like)
        if shape is None or y.shape == shape:
            return y
        aligned = self.aligned.setdefault(k, [])
        for x in aligned:
            if x.shape == shape:
                return x
        if aligned and self.user_align is None and leads_through(y.shape, aligned[-1].shape, shape):
            through = align(aligned[-1], shape)  # the same numbers, and backward fewer of them
            assert through is not None
            aligned.append(through)
        else:
            aligned.append(self._align(k, shape, like, target))
        return aligned[-1]

    def _shape_of(self, module: int) -> Size | None:
        if self.found[module] is None and self.known is not None:
            return self.known[module]
        return _shape(self.found[module])

    def _align(self, k: int, shape: Size, like: int, target: int | None) -> Tensor:
        y, name = self.found[k], self.layout.name
        x: Any = (self.user_align or align)(y, shape)
        if isinstance(x, Tensor) and x.shape == shape:
            return x
        reader = "the output of the stack" if target is None else name(target)
        returned = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        given = f" (the one given returned {returned})" if self.user_align else ""
        raise ConnectivityError(
            f"{name(k)} has output shape {tuple(y.shape)} and cannot feed {reader}, which needs {tuple(shape)}, "
            f"the output shape of {name(like)}. Pass align=fn(source, shape){given}."
        )


def _shape(y: Any) -> Size | None:
    return y.shape if isinstance(y, Tensor) and not y.is_nested else None
