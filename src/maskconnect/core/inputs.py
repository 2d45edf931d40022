"""The input of every module in one forward pass, from the outputs of its active sources (Eq. 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from maskconnect.core.aggregate import divisor_of, masked_total, scaled_total, total
from maskconnect.core.layers import Layer, LayerAggregation, Reader
from maskconnect.core.masks import BinaryMasks
from maskconnect.core.mixture import mixes, mixture
from maskconnect.core.outputs import INPUT, Outputs, Shapes
from maskconnect.core.reference import is_reference
from maskconnect.core.wiring import Layout, Sources


@dataclass(kw_only=True)
class Inputs:
    """What it takes to make them."""

    layout: Layout
    candidates: Sources
    masks: BinaryMasks
    real: Tensor
    rows: tuple[Tensor, ...] | None  # the mask of each target, binary or blended, while masks are learned
    aggregation: str | Callable[[Sequence[Any], Tensor], Any] | LayerAggregation
    credit: str = "whole"  # what of a source counts for its mask: "whole", or what is "new" beside the rest
    scales: Tensor | None = None  # learned ones of all candidates of all targets, if the aggregation has such

    @property
    def learning(self) -> bool:
        """Whether masks learn in this pass."""
        return self.rows is not None

    @property
    def by_layer(self) -> bool:
        """Whether the inputs of a layer are made together."""
        return isinstance(self.aggregation, LayerAggregation)

    def outputs(self, x: Any, align: Callable[[Tensor, Size], Tensor | None] | None, known: Shapes | None) -> Outputs:
        """A place for the outputs of this pass, whose input is x."""
        pairs, tensors = self.aggregation == "residual", not callable(self.aggregation)
        shared: frozenset[tuple[int, int]] = self._shared() if pairs else frozenset()
        return Outputs(self.layout, align, only_tensors=tensors, known=known, pairs=pairs, shared=shared, first=x)

    def _shared(self) -> frozenset[tuple[int, int]]:
        """The modules that several targets of one fan-in read in this pass, with that fan-in."""
        reads = Counter(
            (k, self.masks.fan_in[target])
            for target in filter(self.runs, self.layout.targets)
            for k in self.needed(target)
        )
        return frozenset(read for read, count in reads.items() if count > 1)

    @property
    def always(self) -> tuple[int, ...]:
        """What every target reads beside its sources: in a stream, the input of the stack."""
        return (INPUT,) if self.aggregation == "stream" else ()

    def needed(self, target: int) -> tuple[int, ...]:
        """The sources whose outputs a target needs: all its candidates while learning, else the active ones."""
        return self.candidates[target] if self.rows is not None else self.masks.sources[target]

    def runs(self, number: int) -> bool:
        """Whether the output of a module is asked for: of every one while masks are learned, else of those alive."""
        return self.rows is not None or self.masks.alive[number]

    def first(self, x: Any, number: int) -> Any:
        """The input of the stack, for a module of the first layer, which may change it in place."""
        alone = number == self.layout.layers[0][-1] and not self.always  # nobody reads it after this module
        return x if self.by_layer or alone else cloned(x)

    def sources(self, target: int, outputs: Outputs) -> list[Any]:
        """The outputs that a target needs, aligned."""
        if target not in self.layout.targets:
            return []
        before, fan_in = self.layout.before(target), self.masks.fan_in[target]
        return [outputs.source(k, before, fan_in, target) for k in (*self.always, *self.needed(target))]

    def one(self, target: int, sources: list[Any]) -> Any:
        """The input of a target from its sources."""
        if self.rows is not None:
            x, shared = self._masked(target, sources), True
        else:
            x, shared = self._active(sources, target), self.masks.readers[self.masks.sources[target][0]] > 1
        # A module may change its input in place, which must not reach the other readers of a lone source.
        return cloned(x) if shared and any(x is y for y in sources) else x

    def _masked(self, target: int, sources: list[Any]) -> Any:
        """The aggregate of all candidates, through which the mask learns."""
        assert self.rows is not None
        row = self.rows[target - self.layout.targets.start]
        read = set(self.masks.sources[target])
        active, blended = [k in read for k in self.candidates[target]], self.masks.fan_in[target] < len(read)
        if callable(self.aggregation):
            return self.aggregation([y if on else _detached(y) for y, on in zip(sources, active, strict=True)], row)
        if (scale_S := self._scale(target)) is not None:
            return scaled_total(sources, scale_S * row) if blended else scaled_total(sources, scale_S, row)
        assert isinstance(self.aggregation, str)
        divisor = divisor_of(self.aggregation, self.masks.fan_in[target])
        if self.always:
            row, active = torch.cat([row.new_ones(len(self.always)), row]), [True] * len(self.always) + active
        return self._activated(masked_total(row, active, divisor, sources, self.credit, blended=blended))

    def _scale(self, target: int) -> Tensor | None:
        """The learned scales of the candidates of a target."""
        if self.scales is None:
            return None
        return self.scales[target - self.layout.targets.start, : len(self.candidates[target])]

    def _active(self, sources: list[Any], target: int | None = None) -> Any:
        """The aggregate of sources that are all active; without a target, as the output of the stack."""
        if callable(self.aggregation):
            return self.aggregation(sources, self.real.new_ones(len(sources)))
        if target is not None and (scale_S := self._scale(target)) is not None:
            return scaled_total(sources, scale_S[active_places(self.candidates[target], self.masks.sources[target])])
        assert isinstance(self.aggregation, str)
        return self._activated(total(sources, divisor_of(self.aggregation, len(sources))))

    def _activated(self, x: Tensor) -> Tensor:
        """A join of residual blocks ends in a ReLU; others in nothing."""
        return F.relu(x) if self.aggregation == "residual" else x

    def layer(self, number: int, outputs: Outputs) -> dict[int, Any]:
        """The inputs of a layer's modules by their flat numbers; empty where each module's is made by itself."""
        if number == 0:
            return {}
        if not self.by_layer:
            return self._mixed(number, outputs)
        readers = self._readers(number)
        inputs = self._together(number - 1, outputs, list(readers.values()))
        return {j: x if readers[j].alive else _detached(x) for j, x in zip(readers, inputs, strict=True)}

    def _mixed(self, number: int, outputs: Outputs) -> dict[int, Any]:
        """The inputs of a layer while masks are blended, by one matrix product where that is possible."""
        if self.rows is None or not self.layout.layered or self.aggregation not in ("mean", "sum"):
            return {}
        above, targets = self.layout.layers[number - 1], self.layout.layers[number]
        sources = [outputs.found[k] for k in above]
        whole = all(self.candidates[j] == tuple(above) for j in targets)
        blended = all(self.masks.fan_in[j] < len(self.masks.sources[j]) for j in targets)
        if not (whole and blended and len(targets) > 1 and mixes(sources)):
            return {}
        first = self.layout.targets.start
        mask_TS = torch.stack([self.rows[j - first] for j in targets])
        divisor_T = [divisor_of(str(self.aggregation), self.masks.fan_in[j]) for j in targets]
        return dict(zip(targets, mixture(mask_TS, divisor_T, self.credit, sources), strict=True))

    def _readers(self, number: int) -> dict[int, Reader]:
        """The modules of a layer as readers of the one before, by the flat number of the module."""
        start = self.layout.layers[number - 1].start
        readers = {}
        for target in filter(self.runs, self.layout.layers[number]):
            read, candidates = self.masks.sources[target], self.candidates[target]
            readers[target] = Reader(
                candidates=tuple(k - start for k in candidates),
                active=tuple(k in read for k in candidates),
                mask_S=None if self.rows is None else self.rows[target - self.layout.targets.start],
                fan_in=self.masks.fan_in[target],
                alive=self.masks.alive[target],
            )
        return readers

    def _everything(self) -> Reader:
        """The output of a layered stack, as the reader of the last layer."""
        branches = len(self.layout.layers[-1])
        return Reader(tuple(range(branches)), (True,) * branches, None, branches, alive=True)

    def at_once(self, modules: Sequence[nn.Module], x: Any) -> Any | None:
        """The output of the stack from a fast path of its aggregation; None without one."""
        if not isinstance(self.aggregation, LayerAggregation) or is_reference() or torch.compiler.is_compiling():
            return None
        layers = []
        for number, members in enumerate(self.layout.layers):
            last = members is self.layout.layers[-1]
            layers.append(
                Layer(
                    branches={k - members.start: modules[k] for k in members if self.runs(k)},
                    alive=frozenset(k - members.start for k in members if self.masks.alive[k]),
                    readers=[self._everything()] if last else list(self._readers(number + 1).values()),
                )
            )
        return self.aggregation.at_once(layers, x)

    def output(self, outputs: Outputs) -> Any:
        """The output of the stack: the last module's; layered, the aggregate of all branches of the last layer."""
        last = self.layout.layers[-1]
        if self.by_layer:
            return self._together(len(self.layout.layers) - 1, outputs, [self._everything()])[0]
        if not self.layout.layered and not self.layout.all_out:
            return outputs.last() if callable(self.aggregation) else self._activated(outputs.last())
        read = self.layout.outputs
        return self._active([outputs.source(k, last[-1], len(read)) for k in (*self.always, *read)])

    def _together(self, layer: int, outputs: Outputs, readers: list[Reader]) -> list[Any]:
        """What readers get from a layer."""
        assert isinstance(self.aggregation, LayerAggregation)
        members = self.layout.layers[layer]
        found = {branch: outputs.found[k] for branch, k in enumerate(members) if self.runs(k)}
        alive = {branch for branch, k in enumerate(members) if self.masks.alive[k]}
        inputs: list[Any] = self.aggregation(layer, found, alive, readers)
        return inputs


def active_places(candidates: Sequence[int], sources: Sequence[int]) -> list[int]:
    """Where in a row of candidates those are that are read."""
    return [candidates.index(k) for k in sources]


def _detached(y: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, y)


def cloned(y: Any) -> Any:
    """A copy of every tensor in an output."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, y)
