"""One forward pass through a stack, readable from top to bottom (section 3.2 and steps 1 and 2 of Algorithm 1).

Every module runs while masks are learned, because the gradient of the masks needs every candidate's output;
one whose output nothing reads runs without a graph. Afterwards only modules that can reach the output run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from maskconnect.core.aggregate import masked_total, total, with_zero_gradient
from maskconnect.core.binary import BinaryMasks
from maskconnect.core.outputs import Outputs, Shapes
from maskconnect.core.wiring import Layout, Sources

MOST_SHAPES = 64
"""For how many shapes of its input a stack remembers the output shapes of its modules."""


@dataclass(kw_only=True)
class ForwardPass:
    """What one pass needs to know."""

    modules: Sequence[nn.Module]
    layout: Layout
    candidates: Sources
    masks: BinaryMasks
    real: Tensor
    rows: tuple[Tensor, ...] | None  # the binary mask of each target, while masks are learned
    aggregation: str | Callable[[Sequence[Any], Tensor], Any]
    align: Callable[[Tensor, Size], Tensor] | None
    shapes: dict[Any, Shapes]  # what earlier passes found, by the shapes of their inputs

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of the stack."""
        key = self.shape_key((x, args, kwargs))
        known = self.shapes.get(key)
        outputs = Outputs(self.layout, self.align, not callable(self.aggregation), known)
        first, last = self.layout.layers[0], self.layout.layers[-1]
        for number, (module, alive) in enumerate(zip(self.modules, self.masks.alive, strict=True)):
            if not alive and known is not None:
                outputs.skip()
                continue
            sources = self.sources_of(number, outputs)
            with nullcontext() if alive else self.without_trace(module):
                if number in first:  # a module may change its input in place, which must not reach its neighbours
                    inputs = x if number == first[-1] else _cloned(x)
                else:
                    inputs = self.combine(number, sources)
                if number == last[-1]:
                    inputs = self.reaching_idle_parameters(inputs)
                outputs.append(module(inputs, *args, **kwargs))
        if key is not None and known is None and not all(self.masks.alive):
            if len(self.shapes) >= MOST_SHAPES:
                self.shapes.clear()
            self.shapes[key] = outputs.shapes()
        if not self.layout.layered:
            return outputs.last()
        return self.combine_active([outputs.source(k, last[-1]) for k in last])

    def sources_of(self, target: int, outputs: Outputs) -> list[Any]:
        """The outputs that a target needs, aligned: of all its candidates while learning, else of the active ones."""
        needed = self.candidates[target] if self.rows is not None else self.masks.sources[target]
        before = self.layout.before(target)
        return [outputs.source(k, before, target) for k in needed]

    def combine(self, target: int, sources: list[Any]) -> Any:
        """The input of a target (Eq. 1)."""
        if self.rows is not None:
            x, shared = self.combine_masked(target, sources), True
        else:
            x, shared = self.combine_active(sources), self.masks.readers[self.masks.sources[target][0]] > 1
        # A module may change its input in place, which must not reach the other readers of a lone source.
        return _cloned(x) if shared and any(x is y for y in sources) else x

    def combine_masked(self, target: int, sources: list[Any]) -> Any:
        """The aggregate of all candidates, through which the mask learns."""
        assert self.rows is not None
        row = self.rows[target - self.layout.targets.start]
        read = set(self.masks.sources[target])
        active = [k in read for k in self.candidates[target]]
        if callable(self.aggregation):
            return self.aggregation([y if on else _detached(y) for y, on in zip(sources, active, strict=True)], row)
        return masked_total(row, active, len(read) if self.aggregation == "mean" else 1, sources)

    def combine_active(self, sources: list[Any]) -> Any:
        """The aggregate of sources that are all active."""
        if callable(self.aggregation):
            return self.aggregation(sources, self.real.new_ones(len(sources)))
        return total(sources, len(sources) if self.aggregation == "mean" else 1)

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

    @contextmanager
    def without_trace(self, module: nn.Module) -> Iterator[None]:
        """Run a module that nothing reads: without a graph and, where only its shape is asked for, in eval mode."""
        probing = self.rows is None
        training = [part for part in module.modules() if part.training] if probing else []
        devices = [p.device for p in module.parameters() if p.is_cuda][:1]
        fork = torch.random.fork_rng(devices) if probing and not torch.compiler.is_compiling() else nullcontext()
        try:
            for part in training:
                part.training = False  # no dropout is drawn, no statistics move
            with torch.no_grad(), fork:
                yield
        finally:
            for part in training:
                part.training = True

    def shape_key(self, inputs: Any) -> tuple[Any, ...] | None:
        """What the output shapes depend on, where they can be looked up: not while learning, when every module runs."""
        if self.rows is not None or torch.compiler.is_compiling():
            return None
        key = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(inputs))
        return key if all(isinstance(leaf, Hashable) for leaf in key) else None


def _detached(y: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, y)


def _cloned(y: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, y)
