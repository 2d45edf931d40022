"""What stays of a stack after pruning: static wiring, and no masks (D10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from maskconnect.core.aggregate import total
from maskconnect.core.inputs import cloned
from maskconnect.core.layerwise import LayerAggregation, Reader
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConnectivityError


@dataclass(frozen=True)
class Subsample:
    """What `align` did to a source in the example, in numbers."""

    strides: tuple[int, ...]  # of the axes after the channels
    zeros: int  # further channels
    unseen: tuple[tuple[int, int], ...]  # axes whose strides the example did not show, and their lengths in it

    def __call__(self, y: Tensor) -> Tensor:
        """Every stride-th position, and channels of zeros."""
        _check(y, self.unseen)
        if any(stride > 1 for stride in self.strides):
            y = y[(slice(None), slice(None), *(slice(None, None, stride) for stride in self.strides))]
        return F.pad(y, [0, 0] * len(self.strides) + [0, self.zeros]) if self.zeros else y


@dataclass(frozen=True)
class Wanted:
    """The shape that the user's own `align` is asked for: that of a module that stays, else the source's, scaled."""

    like: int | None
    scale: tuple[tuple[int, int], ...]  # n becomes n * up / down, rounded up; a missing axis has length 1
    unseen: tuple[tuple[int, int], ...]

    def __call__(self, y: Tensor, *like: Tensor) -> Size:
        """The shape for source y, in the likeness of another output."""
        if like:
            return like[0].shape
        _check(y, self.unseen)
        lengths = zip((*y.shape, *(1 for _ in self.scale)), self.scale, strict=False)
        return Size([-(-n * up // down) for n, (up, down) in lengths])


def _check(y: Tensor, unseen: Iterable[tuple[int, int]]) -> None:
    """Rather an error than a guess."""
    for axis, length in unseen:
        if y.shape[axis] != length:
            raise ConnectivityError(
                f"axis {axis} of an output of shape {tuple(y.shape)} had length {length} when the network was pruned, "
                "which did not show how it is aligned at other lengths. Prune with an example of this size."
            )


@dataclass(frozen=True)
class Step:
    """Run a module, align the output of one, or make the output of layers; the result is found under `number`."""

    number: int  # a module's own; of what is aligned, and of the output, a further one
    reads: tuple[int, ...]  # nothing: the input of the stack
    how: Subsample | Wanted | None = None  # where it aligns
    shared: bool = False  # others may read the same tensor, which a module may change in place
    done: tuple[int, ...] = ()  # what nothing reads after it


class PlainStack(nn.Module):
    """What stays of a chain, or of layers whose branches each read for themselves."""

    def __init__(self, stack: MaskedStack, steps: Sequence[Step]) -> None:
        super().__init__()
        self.train(stack.training)
        self.blocks, self.aggregation, self.align = alive_blocks(stack), stack.aggregation, stack.align
        self.steps, self.places = tuple(steps), stack.layout.places
        self.layered = stack.layout.layered

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the modules in order, each on the aggregate of its sources; extra arguments go to all."""
        found: dict[int, Any] = {}
        for step in self.steps:
            sources = [found[number] for number in step.reads]
            if step.how is not None:
                y = self._aligned(sources, step.how)
            else:
                y = self._aggregate(sources) if sources else x
                if step.shared and any(y is source for source in sources or [x]):
                    y = cloned(y)
                if step.number < len(self.places):
                    y = self._module(step.number)(y, *args, **kwargs)
            found[step.number] = y
            for number in step.done:
                del found[number]
        return y

    def _module(self, number: int) -> nn.Module:
        layer, branch = self.places[number]
        module = self.blocks[str(layer)]
        return cast(nn.ModuleDict, module)[str(branch)] if self.layered else module

    def _aligned(self, sources: list[Any], how: Subsample | Wanted) -> Tensor:
        if isinstance(how, Subsample):
            return how(sources[0])
        assert self.align is not None
        return self.align(sources[0], how(*sources))

    def _aggregate(self, sources: list[Any]) -> Any:
        if not callable(self.aggregation):
            return total(sources, len(sources) if self.aggregation == "mean" else 1)
        like = next((leaf for leaf in tree_leaves(sources) if isinstance(leaf, Tensor)), torch.empty(0))
        dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
        return self.aggregation(sources, torch.ones(len(sources), dtype=dtype, device=like.device))


class PlainLayers(nn.Module):
    """What stays of layers whose inputs a LayerAggregation makes together, a layer at a time."""

    def __init__(self, stack: MaskedStack) -> None:
        super().__init__()
        self.train(stack.training)
        self.blocks, self.aggregation = alive_blocks(stack), cast(LayerAggregation, stack.aggregation)
        masks, layers = stack.masks.settled(), stack.layout.layers
        reads = [[masks.sources[j] for j in members if masks.alive[j]] for members in layers[1:]]
        self.readers = [  # of each layer; the output reads all of the last
            [Reader(tuple(k - members.start for k in row), (True,) * len(row), None, alive=True) for row in rows]
            for members, rows in zip(layers, [*reads, [tuple(layers[-1])]], strict=True)
        ]

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run layer after layer; extra arguments go to all branches."""
        layers = [cast(nn.ModuleDict, layer) for layer in self.blocks.values()]
        inputs = [x] * len(layers[0])
        for number, (layer, readers) in enumerate(zip(layers, self.readers, strict=True)):
            branches = zip(layer.items(), inputs, strict=True)
            outputs = {int(name): branch(read, *args, **kwargs) for (name, branch), read in branches}
            inputs = self.aggregation(number, outputs, set(outputs), readers)
        return inputs[0]


def alive_blocks(stack: MaskedStack) -> nn.ModuleDict:
    """The modules that stay, under the numbers that they had."""
    alive = iter(stack.masks.settled().alive)

    def kept(modules: nn.ModuleList, inside: bool) -> nn.ModuleDict:
        found = nn.ModuleDict().train(stack.training)
        for number, module in enumerate(modules):
            if inside:
                found[str(number)] = kept(cast(nn.ModuleList, module), False)
            elif next(alive):
                found[str(number)] = module
        return found

    return kept(stack.blocks, stack.layout.layered)
