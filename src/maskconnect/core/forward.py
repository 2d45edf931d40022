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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from maskconnect.core.aggregate import with_zero_gradient
from maskconnect.core.inputs import Inputs
from maskconnect.core.outputs import Shapes

MOST_SHAPES = 64
"""For how many shapes of its input a stack remembers the output shapes of its modules."""


@dataclass(kw_only=True)
class ForwardPass:
    """What one pass needs to know."""

    modules: Sequence[nn.Module]
    inputs: Inputs
    align: Callable[[Tensor, Size], Tensor] | None
    shapes: dict[Any, Shapes]  # what earlier passes found, by the shapes of their inputs
    second: Any = None  # what the first module of the second layer read in this pass

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of the stack."""
        fast = None if args or kwargs else self.inputs.at_once(self.modules, x)
        if fast is not None:
            self.second, output = fast
            learning = self.inputs.rows is not None  # then every module has run
            return output if learning else reaching_idle_parameters(output, self.modules, self.inputs.masks.alive)
        key = self.shape_key((x, args, kwargs))
        known = self.shapes.get(key)
        layout, make = self.inputs.layout, self.inputs
        outputs = make.outputs(x, self.align, known)
        for layer, members in enumerate(layout.layers):
            together = make.layer(layer, outputs) if make.by_layer and layer else {}
            for number in members:
                module, alive = self.modules[number], make.masks.alive[number]
                if not make.runs(number) and (make.by_layer or known is not None):  # else its output shape is needed
                    outputs.skip()
                    continue
                sources = [] if make.by_layer else make.sources(number, outputs)
                with nullcontext() if alive else self.without_trace(module):
                    if layer == 0:
                        read = make.first(x, number)
                    else:
                        read = together[number] if make.by_layer else make.one(number, sources)
                    if layer == 1 and self.second is None:
                        self.second = read
                    if number == len(self.modules) - 1:
                        read = reaching_idle_parameters(read, self.modules, make.masks.alive)
                    outputs.append(module(read, *args, **kwargs))
        if key is not None and known is None and not all(make.masks.alive):
            if len(self.shapes) >= MOST_SHAPES:
                self.shapes.clear()
            self.shapes[key] = outputs.shapes()
        return make.output(outputs)

    @contextmanager
    def without_trace(self, module: nn.Module) -> Iterator[None]:
        """Run a module that nothing reads: without a graph and, where only its shape is asked for, in eval mode."""
        probing = self.inputs.rows is None
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
        leaves = tree_leaves(inputs)
        nested = any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
        if self.inputs.rows is not None or nested or torch.compiler.is_compiling():
            return None
        key = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return key if all(isinstance(leaf, Hashable) for leaf in key) else None


def reaching_idle_parameters(x: Any, modules: Sequence[nn.Module], alive: Sequence[bool]) -> Any:
    """x, through which the parameters of modules that nothing reads get a gradient of zero, not None (D14)."""
    if not torch.is_grad_enabled() or all(alive):
        return x
    idle = [module for module, on in zip(modules, alive, strict=True) if not on]
    parameters = [p for module in idle for p in module.parameters() if p.requires_grad]
    leaves, tree = tree_flatten(x)
    for i, leaf in enumerate(leaves):
        if parameters and isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[i] = with_zero_gradient(leaf, parameters)
            return tree_unflatten(leaves, tree)
    return x
