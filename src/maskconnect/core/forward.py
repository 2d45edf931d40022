"""One forward pass through a stack, readable from top to bottom (section 3.2 and steps 1 and 2 of Algorithm 1).

Every module runs while masks are learned, because the gradient of the masks needs every candidate's output;
one whose output nothing reads runs without a graph. Afterwards only modules that can reach the output run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from maskconnect.core.aggregate import masked_total, total, with_zero_gradient
from maskconnect.core.align import align
from maskconnect.core.masks import BinaryMasks
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConnectivityError

MOST_SHAPES = 64
"""Of how many input shapes a stack remembers the output shapes of its modules."""


@dataclass(kw_only=True)
class ForwardPass:
    """What one pass needs to know, the outputs so far, and every source in the shapes its targets ask for."""

    modules: Sequence[nn.Module]
    layout: Layout
    candidates: Sources
    masks: BinaryMasks
    real: Tensor
    rows: tuple[Tensor, ...] | None  # the binary mask of each target, while masks are learned
    aggregation: str | Callable[[Sequence[Any], Tensor], Any]
    align: Callable[[Tensor, Size], Tensor] | None
    shapes: dict[Size, list[Size | None]]  # the output shapes of all modules, by the shape of the input
    outputs: list[Any] = field(default_factory=list)
    known: list[Size | None] | None = None
    aligned: dict[tuple[int, Size], Tensor] = field(default_factory=dict)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of the stack."""
        memory = self.rows is None and isinstance(x, Tensor) and not torch.compiler.is_compiling()
        self.known = self.shapes.get(x.shape) if memory else None
        last = self.layout.layers[-1]
        for number, (module, alive) in enumerate(zip(self.modules, self.masks.alive, strict=True)):
            if not alive and self.known is not None:
                self.outputs.append(None)
                continue
            sources = self.sources_of(number)
            with nullcontext() if alive else self.without_trace(module):
                inputs = self.combine(number, sources) if sources else x
                if number == last[-1]:
                    inputs = self.reaching_idle_parameters(inputs)
                self.outputs.append(module(inputs, *args, **kwargs))
        if memory and self.known is None and not all(self.masks.alive):
            self.remember_shapes(x.shape)
        if not self.layout.layered:
            return self.outputs[-1]
        return self.combine_active([self.source(k, last[-1]) for k in last])

    @contextmanager
    def without_trace(self, module: nn.Module) -> Iterator[None]:
        """Run a module that nothing reads: without a graph and, where only its shape is asked for, in eval mode."""
        training = [part for part in module.modules() if part.training] if self.rows is None else []
        try:
            for part in training:
                part.training = False  # no dropout is drawn, no statistics move
            with torch.no_grad():
                yield
        finally:
            for part in training:
                part.training = True

    def sources_of(self, target: int) -> list[Any]:
        """The outputs that a target needs, aligned: of all its candidates while learning, else of the active ones."""
        needed = self.candidates if self.rows is not None else self.masks.sources
        if not needed[target]:
            return []
        before = self.layout.before(target)
        return [self.source(k, before, target) for k in needed[target]]

    def combine(self, target: int, sources: list[Any]) -> Any:
        """The input of a target (Eq. 1)."""
        if self.rows is None:
            x = self.combine_active(sources)
            # A module may change its input in place, which must not reach the other readers of a lone source.
            shared = len(sources) == 1 and self.masks.readers[self.masks.sources[target][0]] > 1
            return x.clone() if shared and x is sources[0] else x
        row = self.rows[target - self.layout.targets.start]
        read = set(self.masks.sources[target])
        active = [k in read for k in self.candidates[target]]
        if callable(self.aggregation):
            return self.aggregation([y if on else _detached(y) for y, on in zip(sources, active, strict=True)], row)
        return masked_total(row, active, sum(active) if self.aggregation == "mean" else 1, sources)

    def combine_active(self, sources: list[Any]) -> Any:
        """The aggregate of sources that are all active."""
        if callable(self.aggregation):
            return self.aggregation(sources, self.real.new_ones(len(sources)))
        return total(sources, len(sources) if self.aggregation == "mean" else 1)

    def source(self, k: int, like: int, target: int | None = None) -> Any:
        """The output of module k in the shape of module `like`'s; what is not a tensor stays as it is."""
        y = self.outputs[k]
        shape = self.known[like] if self.known is not None else _shape(self.outputs[like])
        if not isinstance(y, Tensor) or shape is None or y.shape == shape:
            return y
        if (k, shape) not in self.aligned:
            found = (self.align or align)(y, shape)
            if found is None or found.shape != shape:
                name = self.layout.name
                reader = "the output of the stack" if target is None else name(target)
                given = f" (the one given returned {tuple(found.shape)})" if found is not None else ""
                raise ConnectivityError(
                    f"{name(k)} has output shape {tuple(y.shape)} and cannot feed {reader}, which needs "
                    f"{tuple(shape)}, the output shape of {name(like)}. Pass align=fn(source, shape){given}."
                )
            self.aligned[k, shape] = found
        return self.aligned[k, shape]

    def reaching_idle_parameters(self, x: Any) -> Any:
        """x, through which the parameters of modules that nothing reads get a gradient of zero, not None (D14)."""
        if not torch.is_grad_enabled() or all(self.masks.alive):
            return x
        idle = [module for module, alive in zip(self.modules, self.masks.alive, strict=True) if not alive]
        parameters = [p for module in idle for p in module.parameters() if p.requires_grad]
        leaves, tree = tree_flatten(x)
        for i, leaf in enumerate(leaves):
            if parameters and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[i] = with_zero_gradient(leaf, parameters)
                return tree_unflatten(leaves, tree)
        return x

    def remember_shapes(self, shape: Size) -> None:
        """Spare the next pass with an input of this shape the modules that nothing reads."""
        if len(self.shapes) >= MOST_SHAPES:
            self.shapes.clear()
        self.shapes[shape] = [_shape(y) for y in self.outputs]


def _shape(y: Any) -> Size | None:
    return y.shape if isinstance(y, Tensor) else None


def _detached(y: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, y)
