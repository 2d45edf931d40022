"""Alternatives to binary masks for choosing sources; for `benchmarks/discovery.py`.

    softmax   x_j = sum_k softmax(a_j)_k y_k, as DARTS mixes operations; at the freeze, the K largest a_jk stay
    gumbel    x_j = (1/K) sum_k s_jk y_k, with s_j a relaxed draw of K sources: K times a softmax of a_j + Gumbel noise,
              each time without what was taken before; its temperature falls, and at the freeze the K largest a_jk stay

Both learn a with Adam, together with the weights and on the same batches. `left_out` chooses sources by how much the
loss on held-out images grows without each of them.

Shape letters: T targets, S candidate sources, K fan-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskconnect as mc

Batch = tuple[Tensor, Tensor]
EPSILON = 1e-6


class Relaxed(nn.Module):
    """The modules of a layered stack, each reading a weighted mean of the whole layer before."""

    def __init__(self, stack: mc.MaskedStack, fan_in: int, how: str, steps: int) -> None:
        super().__init__()
        self.blocks, self.fan_in, self.how, self.steps, self.taken = stack.blocks, fan_in, how, steps, 0
        layers = [len(cast(nn.ModuleList, layer)) for layer in stack.blocks]
        self.targets = sum(layers[1:])
        self.alpha = nn.Parameter(torch.zeros(self.targets, layers[0]))
        self.given_TS: Tensor | None = None  # weights to use instead of those from alpha

    def weights(self) -> Tensor:
        """Return the weight of every source for every target; a row adds up to 1."""
        if self.given_TS is not None:
            return self.given_TS
        if self.how == "softmax" or not self.training:
            return self.alpha.softmax(dim=1)
        temperature = max(0.1, 1 - self.taken / self.steps)
        noise_TS = -torch.empty_like(self.alpha).exponential_().log()
        return relaxed_top(self.alpha + noise_TS, self.fan_in, temperature) / self.fan_in

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last module."""
        weight_TS, row = self.weights(), 0
        outputs = [branch(x) for branch in cast(nn.ModuleList, self.blocks[0])]
        for layer in list(self.blocks)[1:]:
            made = []
            for branch in cast(nn.ModuleList, layer):
                made.append(branch(sum(w * y for w, y in zip(weight_TS[row], outputs, strict=True))))
                row += 1
            outputs = made
        (output,) = outputs
        return cast(Tensor, output)

    def cut(self, chosen_TS: Tensor) -> mc.MaskedStack:
        """Return the same modules, each reading the K sources with the largest values."""
        rows = [sorted(row.topk(self.fan_in).indices.tolist()) for row in chosen_TS]
        wiring: list[Any] = [[[] for _ in cast(nn.ModuleList, self.blocks[0])]]
        row = 0
        for layer in list(self.blocks)[1:]:
            count = len(cast(nn.ModuleList, layer))
            wiring.append(rows[row : row + count])
            row += count
        return mc.MaskedStack(cast(Any, list(self.blocks)), connectivity=wiring)


def relaxed_top(score_TS: Tensor, fan_in: int, temperature: float) -> Tensor:
    """Return a relaxed K-hot vector per row."""
    total_TS, left_TS = torch.zeros_like(score_TS), score_TS
    for _ in range(fan_in):
        one_TS = (left_TS / temperature).softmax(dim=1)
        total_TS = total_TS + one_TS
        left_TS = left_TS + (1 - one_TS).clamp_min(EPSILON).log()
    return total_TS


@torch.no_grad()
def left_out(network: nn.Module, relaxed: Relaxed, weight_TS: Tensor, batches: Sequence[Batch]) -> Tensor:
    """Return how much the loss grows without each source of each target, whose other weights are rescaled."""

    def loss(weights_TS: Tensor) -> float:
        relaxed.given_TS = weights_TS
        return sum(float(F.cross_entropy(network(x), y)) for x, y in batches) / len(batches)

    network.eval()
    base, grown_TS = loss(weight_TS), torch.zeros_like(weight_TS)
    for t, s in torch.cartesian_prod(*map(torch.arange, weight_TS.shape)).tolist():
        without_TS = weight_TS.clone()
        without_TS[t, s] = 0
        without_TS[t] /= without_TS[t].sum().clamp_min(EPSILON)
        grown_TS[t, s] = loss(without_TS) - base
    network.train()
    relaxed.given_TS = None
    return grown_TS
