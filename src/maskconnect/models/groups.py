"""Batch norm over groups of images: on one device, what several devices do that each norm their part of a batch.

The paper trains on several GPUs (appendix: CIFAR ResNets on 2, ResNeXts on 8, with 128 images a step), and so its batch
norms see 64 images, or 16.

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
    """nn.BatchNorm2d that in train mode norms groups of up to `group` images, each with its own statistics.

    A batch is split into as few groups as that takes, their sizes equal or one apart. The running statistics move once
    a step, by the mean over groups.
    """

    group: int

    def __init__(self, num_features: int, group: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = _checked(group)

    def forward(self, input: Tensor) -> Tensor:
        """The images, normalised."""
        self._check_input_dim(input)
        if not self.training or groups_of(self, len(input)) == 1:
            return super().forward(input)
        y, statistics = normalise(self, input)
        if self.track_running_stats:
            track_(self, statistics)
        return y

    def make_plain_(self) -> None:
        """Become the nn.BatchNorm2d that this is in eval mode."""
        self.__class__ = nn.BatchNorm2d  # type: ignore[assignment]

    def extra_repr(self) -> str:
        """As in nn.BatchNorm2d, and the group."""
        return f"{super().extra_repr()}, group={self.group}"  # type: ignore[no-untyped-call]


def group_norms_(model: nn.Module, group: int | None) -> None:
    """Let every nn.BatchNorm2d of `model` norm groups of up to `group` images; None changes nothing.

    The norms stay the same objects, with their parameters, statistics and hooks.
    """
    if group is None:
        return
    group = _checked(group)
    norms = {name: part for name, part in model.named_modules() if isinstance(part, nn.BatchNorm2d)}
    for name, norm in norms.items():
        if type(norm) not in (nn.BatchNorm2d, GroupedBatchNorm2d):
            raise ConfigError(
                f"{name or 'the model'} is a {type(norm).__name__}; only an nn.BatchNorm2d can norm groups of images, "
                "and no class derived from it."
            )
    for norm in norms.values():
        norm.__class__ = GroupedBatchNorm2d  # as torch's own lazy modules change theirs
        assert isinstance(norm, GroupedBatchNorm2d)
        norm.group = group


def groups_of(norm: nn.BatchNorm2d, images: int) -> int:
    """G, how many groups `norm` makes of a batch."""
    return max(1, -(-images // norm.group)) if isinstance(norm, GroupedBatchNorm2d) else 1


class Statistics(NamedTuple):
    """What the groups of a batch were normalised with."""

    mean_GC: Tensor
    variance_GC: Tensor  # biased
    unbiased_GC: Tensor  # as that of the values of one branch


def normalise(norm: nn.BatchNorm2d, pooled: Tensor, branches: int = 1) -> tuple[Tensor, Statistics]:
    """Each group of images normalised with its own statistics.

    `pooled` has the N images of a branch, then those of the next; the statistics of a group are of all branches.
    """
    images = len(pooled) // branches
    groups = groups_of(norm, images)
    if groups == 1:
        return _as_one(pooled, norm.weight, norm.bias, norm.eps, branches)
    if images % groups == 0 and not _is_channels_last(pooled):
        return _as_channels(norm, pooled, groups, branches)
    order_I = (torch.arange(len(pooled)) % images % groups).argsort(stable=True)
    sizes = [branches * len(range(g, images, groups)) for g in range(groups)]
    parts = torch.split(_reordered(pooled, order_I), sizes)
    ys, statistics = zip(*(_as_one(x, norm.weight, norm.bias, norm.eps, branches) for x in parts), strict=True)
    return _reordered(torch.cat(ys), order_I.argsort()), Statistics(*map(torch.cat, zip(*statistics, strict=True)))


def normalise_with(norm: nn.BatchNorm2d, x: Tensor, statistics: Statistics) -> Tensor:
    """The images of another branch, each normalised with the statistics of its group."""
    mean_GC, variance_GC, _ = statistics
    if len(mean_GC) == 1:
        return F.batch_norm(x, mean_GC[0], variance_GC[0], norm.weight, norm.bias, eps=norm.eps)
    scale_GC = norm.weight / (variance_GC + norm.eps).sqrt()
    shift_GC = norm.bias - mean_GC * scale_GC
    group_N = torch.arange(len(x), device=x.device) % len(mean_GC)
    return torch.addcmul(shift_GC[group_N, :, None, None], x, scale_GC[group_N, :, None, None]).to(x.dtype)


@torch.no_grad()
def track_(norm: nn.BatchNorm2d, statistics: Statistics) -> None:
    """Move the running statistics as nn.BatchNorm2d does, once, by the mean over groups."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(statistics.mean_GC.mean(0), momentum)
    norm.running_var.lerp_(statistics.unbiased_GC.mean(0), momentum)


def _as_one(
    pooled: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, branches: int
) -> tuple[Tensor, Statistics]:
    """The images of one group, normalised."""
    channels = pooled.shape[1]
    count = pooled.numel() // channels
    n = count // branches
    if n == 1:  # torch's own error, here also where there are several branches
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {pooled.shape}")
    mean, variance = (pooled if weight is None else weight).new_zeros(2, 1, channels).unbind()
    y = F.batch_norm(pooled, mean[0], variance[0], weight, bias, training=True, momentum=1.0, eps=eps)
    variance = variance * (1 - 1 / count)  # batch_norm leaves the unbiased one
    return y, Statistics(mean, variance, variance * (n / (n - 1)))


def _as_channels(norm: nn.BatchNorm2d, pooled: Tensor, groups: int, branches: int) -> tuple[Tensor, Statistics]:
    """Groups of equal size, normalised as if they were channels of fewer images. Only a view is needed for that."""
    _, C, H, W = pooled.shape
    weight, bias = (p if p is None else p.repeat(groups) for p in (norm.weight, norm.bias))
    y, statistics = _as_one(pooled.reshape(-1, groups * C, H, W), weight, bias, norm.eps, branches)
    return y.reshape(pooled.shape), Statistics(*(s.reshape(groups, C) for s in statistics))


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """The images in another order, and in the memory format that they had."""
    order = order.to(x.device)
    if _is_channels_last(x):  # index_select itself would make it channels first, at twice the time or more
        return x.permute(0, 2, 3, 1).index_select(0, order).permute(0, 3, 1, 2)
    return x.index_select(0, order)


def _checked(group: int) -> int:
    if integer("group", group) < 2:
        raise ConfigError(f"group is {group}; a batch norm needs groups of 2 images or more.")
    return integer("group", group)
