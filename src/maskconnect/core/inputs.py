"""The input of every module in one forward pass: per target, or for a whole layer at once (Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from maskconnect.core.aggregate import divisor_of
from maskconnect.core.layers import Layer, LayerAggregation, Reader
from maskconnect.core.mixture import mixes, mixture
from maskconnect.core.outputs import Outputs
from maskconnect.core.reference import is_reference
from maskconnect.core.targets import Targets, detached


@dataclass(kw_only=True)
class Inputs(Targets):
    """Computes the inputs of the modules in one forward pass."""

    @property
    def by_layer(self) -> bool:
        """Whether the inputs of a layer are computed together."""
        return isinstance(self.aggregation, LayerAggregation)

    def layer(self, number: int, outputs: Outputs) -> dict[int, Any]:
        """Return the inputs of a layer by flat module number; empty if inputs are computed per module."""
        if number == 0:
            return {}
        if not self.by_layer:
            return self._mixed(number, outputs)
        readers = self._readers(number)
        inputs = self._together(number - 1, outputs, list(readers.values()))
        return {j: x if readers[j].alive else detached(x) for j, x in zip(readers, inputs, strict=True)}

    def _mixed(self, number: int, outputs: Outputs) -> dict[int, Any]:
        """Return the inputs of a layer with blended masks by one matrix product; empty if that is impossible.

        Every branch must be read: a product would also read those whose share is zero.
        """
        if self.rows is None or not self.layout.layered or self.aggregation not in ("mean", "sum"):
            return {}
        above, targets = self.layout.layers[number - 1], self.layout.layers[number]
        sources = [outputs.found[k] for k in above]
        whole = all(tuple(self.candidates[j]) == tuple(above) == tuple(self.masks.sources[j]) for j in targets)
        blended = all(self.masks.fan_in[j] < len(self.masks.sources[j]) for j in targets)
        if not (whole and blended and len(targets) > 1 and mixes(sources)):
            return {}
        first = self.layout.targets.start
        mask_TS = torch.stack([self.rows[j - first] for j in targets])
        divisor_T = [divisor_of(str(self.aggregation), self.masks.fan_in[j]) for j in targets]
        return dict(zip(targets, mixture(mask_TS, divisor_T, self.credit, sources, outputs.sampler), strict=True))

    def _readers(self, number: int) -> dict[int, Reader]:
        """Return the modules of a layer as readers of the layer before, by flat module number."""
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
                weights=tuple(filter(None, self.shares[target])) if self.masks.fan_in[target] < len(read) else None,
            )
        return readers

    def _everything(self) -> Reader:
        """Return the output of a layered stack as a reader of the last layer."""
        branches = len(self.layout.layers[-1])
        return Reader(tuple(range(branches)), (True,) * branches, None, branches, alive=True)

    def at_once(self, modules: Sequence[nn.Module], x: Any) -> Any | None:
        """Return the output of the stack by the fast path of its aggregation; None if there is none."""
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
        """Return the output of the stack: that of the last module; layered, the aggregate of the last layer."""
        last = self.layout.layers[-1]
        if self.by_layer:
            return self._together(len(self.layout.layers) - 1, outputs, [self._everything()])[0]
        if not self.layout.layered and not self.layout.all_out:
            return outputs.last() if callable(self.aggregation) else self._activated(outputs.last())
        read = self.layout.outputs
        return self._active([outputs.source(k, last[-1], len(read)) for k in (*self.always, *read)])

    def _together(self, layer: int, outputs: Outputs, readers: list[Reader]) -> list[Any]:
        """Return the inputs of readers of a layer."""
        assert isinstance(self.aggregation, LayerAggregation)
        members = self.layout.layers[layer]
        found = {branch: outputs.found[k] for branch, k in enumerate(members) if self.runs(k)}
        alive = {branch for branch, k in enumerate(members) if self.masks.alive[k]}
        inputs: list[Any] = self.aggregation(layer, found, alive, readers)
        return inputs
