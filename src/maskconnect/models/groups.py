"""Batch norm over groups of images: one device computes what several devices do that each normalize part of a batch.

The paper trains on several GPUs (appendix: CIFAR ResNets on 2, ResNeXts on 8, with 128 images per step), so its batch
norms see 64 or 16 images.

Shape letters: N images of a branch, G groups, C channels, I images of all branches. Image i of a branch is in group
i % G.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.errors import ConfigError, integer


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d that in train mode normalizes groups of up to `group` images, each with its own statistics.

    A batch is split into the smallest number of groups, whose sizes differ by at most one. The running statistics are
    updated once per step, with the mean over groups.
    """

    group: int

    def __init__(self, num_features: int, group: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = _checked(group)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the images."""
        self._check_input_dim(input)
        if not self.training or groups_of(self, len(input)) == 1:
            return super().forward(input)
        y, statistics = normalize(self, input)
        if self.track_running_stats:
            track_(self, statistics)
        return y

    def make_plain_(self) -> None:
        """Turn this into the nn.BatchNorm2d that it equals in eval mode."""
        self.__class__ = nn.BatchNorm2d  # type: ignore[assignment]

    def extra_repr(self) -> str:
        """Add the group to the text of nn.BatchNorm2d."""
        return f"{super().extra_repr()}, group={self.group}"  # type: ignore[no-untyped-call]


def group_norms_(model: nn.Module, group: int | None) -> None:
    """Make every nn.BatchNorm2d of `model` normalize groups of up to `group` images; None changes nothing.

    The norms stay the same objects, with their parameters, statistics and hooks.
    """
    if group is None:
        return
    group = _checked(group)
    norms = {name: part for name, part in model.named_modules() if isinstance(part, nn.BatchNorm2d)}
    for name, norm in norms.items():
        if type(norm) not in (nn.BatchNorm2d, GroupedBatchNorm2d):
            raise ConfigError(
                f"{name or 'the model'} is a {type(norm).__name__}; only nn.BatchNorm2d itself can normalize "
                "groups, not a subclass. Replace it, or leave training.norm_group out."
            )
    for norm in norms.values():
        norm.__class__ = GroupedBatchNorm2d  # as torch's lazy modules do
        assert isinstance(norm, GroupedBatchNorm2d)
        norm.group = group


def groups_of(norm: nn.BatchNorm2d, images: int) -> int:
    """Return G, the number of groups into which `norm` splits a batch."""
    return max(1, -(-images // norm.group)) if isinstance(norm, GroupedBatchNorm2d) else 1


class Statistics(NamedTuple):
    """The statistics with which the groups of a batch were normalized."""

    mean_GC: Tensor
    variance_GC: Tensor  # biased
    unbiased_GC: Tensor  # for the number of values of one branch


def normalize(norm: nn.BatchNorm2d, pooled: Tensor, branches: int = 1) -> tuple[Tensor, Statistics]:
    """Normalize each group of images with its own statistics.

    `pooled` has the N images of a branch, then those of the next; the statistics of a group cover all branches.
    """
    images = len(pooled) // branches
    groups = groups_of(norm, images)
    if groups == 1:
        return _as_one(pooled, norm.weight, norm.bias, norm.eps, branches)
    if images % groups == 0 and not _is_channels_last(pooled):
        return _as_channels(norm, pooled, groups, branches)
    layout = torch.channels_last if _is_channels_last(pooled) else torch.contiguous_format
    split = Split(groups, branches, layout)
    parts = _Gathered.apply(pooled, split)  # type: ignore[no-untyped-call]
    ys, statistics = zip(*(_as_one(x, norm.weight, norm.bias, norm.eps, branches) for x in parts), strict=True)
    y = _Interleaved.apply(split, *ys)  # type: ignore[no-untyped-call]
    return y, Statistics(*map(torch.cat, zip(*statistics, strict=True)))


def normalize_with(norm: nn.BatchNorm2d, x: Tensor, statistics: Statistics) -> Tensor:
    """Normalize the images of another branch, each with the statistics of its group."""
    mean_GC, variance_GC, _ = statistics
    if len(mean_GC) == 1:
        return F.batch_norm(x, mean_GC[0], variance_GC[0], norm.weight, norm.bias, eps=norm.eps)
    scale_GC = norm.weight / (variance_GC + norm.eps).sqrt()
    shift_GC = norm.bias - mean_GC * scale_GC
    group_N = torch.arange(len(x), device=x.device) % len(mean_GC)
    return torch.addcmul(shift_GC[group_N, :, None, None], x, scale_GC[group_N, :, None, None]).to(x.dtype)


@torch.no_grad()
def track_(norm: nn.BatchNorm2d, statistics: Statistics) -> None:
    """Update the running statistics once, as nn.BatchNorm2d does, with the mean over groups.

    As there, the graph of an earlier pass, which holds them without using them, stays valid.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.data.lerp_(statistics.mean_GC.mean(0), momentum)
    norm.running_var.data.lerp_(statistics.unbiased_GC.mean(0), momentum)


def _as_one(
    pooled: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, branches: int
) -> tuple[Tensor, Statistics]:
    """Normalize the images of one group."""
    channels = pooled.shape[1]
    count = pooled.numel() // channels
    n = count // branches
    if n == 1:  # torch's error, raised here also for several branches
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {pooled.shape}")
    mean, variance = (pooled if weight is None else weight).new_zeros(2, 1, channels).unbind()
    y = F.batch_norm(pooled, mean[0], variance[0], weight, bias, training=True, momentum=1.0, eps=eps)
    variance = variance * (1 - 1 / count)  # batch_norm returns the unbiased one
    return y, Statistics(mean, variance, variance * (n / (n - 1)))


def _as_channels(norm: nn.BatchNorm2d, pooled: Tensor, groups: int, branches: int) -> tuple[Tensor, Statistics]:
    """Normalize groups of equal size as if they were channels of fewer images, which needs only a view."""
    _, C, H, W = pooled.shape
    weight, bias = (p if p is None else p.repeat(groups) for p in (norm.weight, norm.bias))
    y, statistics = _as_one(pooled.reshape(-1, groups * C, H, W), weight, bias, norm.eps, branches)
    return y.reshape(pooled.shape), Statistics(*(s.reshape(groups, C) for s in statistics))


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class Split(NamedTuple):
    """How a batch is split into groups."""

    groups: int
    branches: int
    memory_format: torch.memory_format  # of the batch, and of each group

    def empty(self, images: int, like: Tensor) -> Tensor:
        """Return new memory for images."""
        shape = (images, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=self.memory_format)

    def by_branch(self, images: Tensor) -> Tensor:
        """Return a view with an axis for the branches."""
        return images.view(self.branches, -1, *images.shape[1:])


class _Gathered(torch.autograd.Function):
    """The images of each group, dense in memory: norms of other tensors are slow."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, split: Split) -> tuple[Tensor, ...]:
        ctx.split = split
        parts = []
        for g in range(split.groups):
            images = split.by_branch(pooled)[:, g :: split.groups]
            parts.append(split.empty(split.branches * images.shape[1], pooled))
            split.by_branch(parts[-1]).copy_(images)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Interleaved.apply(ctx.split, *grads), None  # type: ignore[no-untyped-call]


class _Interleaved(torch.autograd.Function):
    """The batch of some groups; the inverse of `_Gathered`."""

    @staticmethod
    def forward(ctx: Any, split: Split, *parts: Tensor) -> Tensor:
        ctx.split = split
        pooled = split.empty(sum(map(len, parts)), parts[0])
        for g, part in enumerate(parts):
            split.by_branch(pooled)[:, g :: split.groups] = split.by_branch(part)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Gathered.apply(grad, ctx.split)  # type: ignore[no-untyped-call]


def _checked(group: int) -> int:
    if integer("group", group) < 2:
        raise ConfigError(f"group is {group}; a batch norm needs groups of 2 images or more. Set group to 2 or more.")
    return integer("group", group)
