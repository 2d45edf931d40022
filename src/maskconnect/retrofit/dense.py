"""A dense block whose layers learn which of the earlier layers to read (DenseNet; section 5 of the paper).

Layer j of a dense block concatenates all features y_k before it, and reads them through a batch norm, an activation and
a convolution. Norm and activation work per channel, and the convolution is a sum over channels. Let z_jk be y_k after
norm and activation, and W_jk the columns of the convolution's weight for it. Then

    h_j = conv1(act(norm1(cat_k y_k))) = sum_k W_jk z_jk

This is Eq. 1 with a transform per connection. A mask entry multiplies z_jk or, with the same result, W_jk:

    h_j = sum_k (m_jk W_jk) z_jk        dl/dm_jk = <dl/dh_j, W_jk z_jk>        at every candidate, active or not

Module 0 is the input of the block, modules 1, 2, ... are its layers. The output is the concatenation of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.inputs import Inputs
from maskconnect.errors import ConfigError
from maskconnect.retrofit.named import NamedStack
from maskconnect.retrofit.narrow import conv_of, growth_of, keep_statistics_, narrowed, norm_of, weighted

INPUT = "input"
"""The name of module 0, which returns the input of the block."""


class DenseStack(NamedStack):
    """The layers of a dense block, each of which reads the features that its mask makes active.

    While masks learn, every layer reads all candidates, each times its mask entry. Otherwise it reads the active ones
    and computes nothing for the channels of the others. With all candidates active, its output is bitwise
    identical to that of the original dense block.

    Args:
        layers: the layers by name; each has `norm1`, `conv1` and `conv2`, and takes a list of features.
        args: see `MaskedStack`.
        kwargs: see `MaskedStack`.
    """

    aggregations = ("concat",)

    def __init__(self, layers: Mapping[str, nn.Module], *args: Any, **kwargs: Any) -> None:
        if INPUT in layers:
            raise ConfigError(f"a layer is called {INPUT!r}, a name that the stack reserves; rename it.")
        super().__init__({INPUT: nn.Identity(), **layers}, *args, aggregation="concat", **kwargs)
        self.widths = widths_of(list(layers.values()))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order, and return the concatenation of the input and all their outputs."""
        inputs = self.begin()
        first, *layers = self.flat()
        features: list[Tensor] = [first(self.reaching_idle_parameters(x, inputs.masks.alive))]
        for number, layer in enumerate(layers, start=1):
            features.append(self._run(number, layer, features, inputs))
        output: Tensor = self.end(inputs, torch.cat(features, dim=1))
        return output

    def _run(self, number: int, layer: nn.Module, features: Sequence[Tensor], inputs: Inputs) -> Tensor:
        """Return the output of a layer, given all features before it."""
        rows, widths = inputs.rows, self.widths[:number]
        reads = inputs.masks.sources[number] if rows is None else self.masks.candidates[number]
        used = small = layer if len(reads) == number else narrowed(layer, widths, reads)
        if rows is not None:
            used = weighted(small, [widths[k] for k in reads], rows[number - self.layout.targets.start])
        y: Tensor = used([features[k] for k in reads])
        if small is not layer:
            keep_statistics_(layer, small, widths, reads)
        return y

    def pruned_layer(self, number: int) -> nn.Module:
        """Return a layer without the weights for channels that it does not read."""
        return narrowed(self.flat()[number], self.widths[:number], self.masks.current_wiring().sources[number])

    def unread_weights(self) -> int:
        """Return how many weights belong to channels that their layer does not read."""
        sources, unread = self.masks.current_wiring().sources, 0
        for number, layer in enumerate(self.flat()[1:], start=1):
            columns = conv_of(layer).weight[:, 0].numel() + sum(1 for _ in norm_of(layer).parameters())
            unread += columns * sum(self.widths[k] for k in range(number) if k not in sources[number])
        return unread


def widths_of(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the number of channels of the input of a dense block and of the output of each layer."""
    return (conv_of(layers[0]).in_channels, *map(growth_of, layers))
