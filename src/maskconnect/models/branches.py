"""The branches of ResNeXt modules and how they are joined (section 3.5; D2, D3 and D9).

    residual   x_j = ReLU( sum_k m_jk F_k(x_k) + (1/K_j) sum_k m_jk S(x_k) )
    mean       x_j = (1/K_j) sum_k m_jk ReLU( F_k(x_k) + S(x_k) )
    sum        x_j = sum_k m_jk ReLU( F_k(x_k) + S(x_k) )

Branches are passed as dicts by their number in the module, because those that cannot reach the output need not run.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.layers import Layer, LayerAggregation, Reader
from maskconnect.errors import ConfigError
from maskconnect.models.blocks import conv
from maskconnect.models.groups import GroupedBatchNorm2d, normalize, normalize_with, track_
from maskconnect.models.synced import SyncedBatchNorm2d, normalize_synced

Branches = Mapping[int, Tensor]


class Branch(nn.Module):
    """F_k, which also returns its input, for the shortcut."""

    def __init__(self, residual: nn.Sequential) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return F_k(x) and x."""
        return self.residual(x), x


class SharedBatchNorm(nn.Module):
    """One batch norm for several branches, with pooled statistics (D3).

    Branches that cannot reach the output are not pooled; they are normalized with the statistics of the others. The
    running statistics are updated once per step, with the unbiased variance of one branch's N*H*W values. So branches
    with equal inputs, as all have in plain ResNeXt, give the statistics of a single branch. If the norm has groups of
    images, all this holds within each group; if it is synchronized, over all ranks.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, xs: Mapping[int, Tensor], alive: set[int]) -> dict[int, Tensor]:
        """Normalize every branch."""
        norm = self.norm
        known = type(norm) in (nn.BatchNorm2d, GroupedBatchNorm2d, SyncedBatchNorm2d)
        if not known or not norm.track_running_stats or norm.weight is None:
            raise ConfigError(
                f"the batch norm that these branches share was replaced or changed (found: {type(norm).__name__}); it "
                "must be an nn.BatchNorm2d with running statistics and a scale. Restore it."
            )
        if not norm.training:
            return {k: norm(x) for k, x in xs.items()}
        live = [k for k in xs if k in alive]
        pooled = torch.cat([xs[k] for k in live])
        together = normalize_synced if type(norm) is SyncedBatchNorm2d else normalize
        y, statistics = together(norm, pooled, branches=len(live))
        track_(norm, statistics)
        normed = dict(zip(live, y.chunk(len(live)), strict=True))
        with torch.no_grad():
            for k in xs.keys() - alive:
                normed[k] = normalize_with(norm, xs[k], statistics)
        return normed


class SharedProjection(nn.Module):
    """The shortcut of all branches of a module that changes the shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = conv(inputs, outputs, 1, stride)
        self.norm = SharedBatchNorm(outputs)

    def forward(self, xs: Branches, alive: set[int]) -> Branches:
        """Return S(x_k) of every branch."""
        normed: Branches = self.norm({k: self.conv(x) for k, x in xs.items()}, alive)
        return normed

    def plain(self, x: Tensor) -> Tensor:
        """Return S(x) of one branch in eval mode."""
        y: Tensor = self.norm.norm(self.conv(x))
        return y


class JoinedBranches(LayerAggregation):
    """The base of the three ways to join branches: it has the shortcut of each module."""

    def __init__(self, shortcuts: Sequence[SharedProjection | None]) -> None:
        super().__init__()
        self.shortcuts = nn.ModuleDict({str(i): s for i, s in enumerate(shortcuts) if s is not None})

    def parts(
        self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]], alive: set[int]
    ) -> tuple[Branches, Branches]:
        """Return F_k(x_k) and S(x_k) of every branch."""
        residual = {k: y for k, (y, _) in outputs.items()}
        xs = {k: x for k, (_, x) in outputs.items()}
        key = str(layer)
        return residual, self.shortcuts[key](xs, alive) if key in self.shortcuts else xs

    def plain_parts(self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[Branches, Branches]:
        """Return the same in eval mode; branches with the same input share a shortcut, which is computed once."""
        residual = {k: y for k, (y, _) in outputs.items()}
        project: Callable[[Tensor], Tensor] = _same
        if str(layer) in self.shortcuts:
            project = cast(SharedProjection, self.shortcuts[str(layer)]).plain
        made: dict[int, Tensor] = {}
        for _, x in outputs.values():
            if id(x) not in made:
                made[id(x)] = project(x)
        return residual, {k: made[id(x)] for k, (_, x) in outputs.items()}


class ResidualSum(JoinedBranches):
    """ReLU( sum of residuals + mean of shortcuts ); the sum goes through a batch norm if the modules have one."""

    lean = False  # whether to recompute wide tensors in the backward pass instead of keeping them

    def __init__(self, shortcuts: Sequence[SharedProjection | None], norms: Sequence[SharedBatchNorm] = ()) -> None:
        super().__init__(shortcuts)
        self.norms = nn.ModuleList(norms)

    def forward(
        self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]], alive: set[int], readers: Sequence[Reader]
    ) -> list[Tensor]:
        """Return the input of every reader."""
        residual, shortcut = self.parts(layer, outputs, alive)
        sums = {j: reader.total(residual) for j, reader in enumerate(readers)}
        if self.norms:
            sums = self.norms[layer](sums, {j for j, reader in enumerate(readers) if reader.alive})
        return [F.relu(sums[j] + reader.total(shortcut, reader.fan_in)) for j, reader in enumerate(readers)]

    def at_once(self, layers: Sequence[Layer], x: Any) -> Tensor | None:
        """Run all branches of all modules in a few wide operations, if they are as `mc.resnext` built them."""
        from maskconnect.models.resnext_fast.at_once import Branched, run  # imported here because they import this file
        from maskconnect.models.resnext_fast.covered import covers

        if not covers(self, layers, x):
            return None
        shortcuts = {number: cast(SharedProjection, part) for number, part in self.shortcuts.items()}
        modules = [Branched(layer, shortcuts.get(str(number))) for number, layer in enumerate(layers)]
        return run(modules, x, lean=self.lean)

    def plain(
        self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]], rows: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Return the input of every reader in eval mode."""
        residual, shortcut = self.plain_parts(layer, outputs)
        if self.norms or len(rows) == 1:
            norm = cast(SharedBatchNorm, self.norms[layer]).norm if self.norms else _same
            sums = [norm(_sum([residual[k] for k in row])) for row in rows]
            return [F.relu(_with_mean(y, [shortcut[k] for k in row])) for y, row in zip(sums, rows, strict=True)]
        # The readers of a branch share the sum of its residual and its part of their shortcuts.
        part = {
            (k, n): _with_mean(residual[k], [shortcut[k]], n)
            for k, n in dict.fromkeys((k, len(row)) for row in rows for k in row)
        }
        return [F.relu(_sum([part[k, len(row)] for k in row])) for row in rows]


def save_memory_(network: nn.Module) -> None:
    """Make a ResNeXt recompute in the backward pass tensors that are as wide as all its branches, to save memory."""
    joins = [part for part in network.modules() if isinstance(part, ResidualSum) and not part.norms]
    if not joins:
        raise ConfigError(
            "this network has no wide tensors to recompute; use a ResNeXt with aggregation='residual' and "
            "norm='branch'."
        )
    for join in joins:
        join.lean = True


class BlockTotal(JoinedBranches):
    """The mean, or the sum, of whole blocks."""

    def __init__(self, shortcuts: Sequence[SharedProjection | None], *, mean: bool) -> None:
        super().__init__(shortcuts)
        self.mean = mean

    def forward(
        self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]], alive: set[int], readers: Sequence[Reader]
    ) -> list[Tensor]:
        """Return the input of every reader."""
        residual, shortcut = self.parts(layer, outputs, alive)
        blocks = {k: F.relu(residual[k] + shortcut[k]) for k in residual}
        return [reader.total(blocks, reader.fan_in if self.mean else 1) for reader in readers]

    def plain(
        self, layer: int, outputs: Mapping[int, tuple[Tensor, Tensor]], rows: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Return the input of every reader in eval mode."""
        residual, shortcut = self.plain_parts(layer, outputs)
        blocks = {k: F.relu(residual[k] + shortcut[k]) for k in residual}
        sums = [_sum([blocks[k] for k in row]) for row in rows]
        return [x / len(row) if self.mean and len(row) > 1 else x for x, row in zip(sums, rows, strict=True)]


def _sum(xs: Sequence[Tensor]) -> Tensor:
    return reduce(operator.add, xs)


def _with_mean(y: Tensor, xs: Sequence[Tensor], count: int | None = None) -> Tensor:
    """Return y plus the sum of xs, divided by their number or by `count`."""
    times = Counter(map(id, xs))
    for x in {id(x): x for x in xs}.values():
        share = times[id(x)] / (count or len(xs))
        y = torch.add(y, x, alpha=share) if share != 1 else y + x
    return y


def _same(x: Tensor) -> Tensor:
    return x
