"""Batch norm over the images of all ranks together; torch's nn.SyncBatchNorm does not support CPUs.

Shape letters: N images of this rank, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.reference import first_order
from maskconnect.errors import ConfigError
from maskconnect.models.groups import GroupedBatchNorm2d, Statistics, track_
from maskconnect.models.resnext_fast.norms import exact_moments


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d that in train mode uses the mean and variance of the images of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the images of this rank."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        y, statistics = normalize_synced(self, input)
        if self.track_running_stats:
            track_(self, statistics)
        return y

    def make_plain_(self) -> None:
        """Turn this into the nn.BatchNorm2d that it equals in eval mode."""
        self.__class__ = nn.BatchNorm2d  # type: ignore[assignment]


def synchronize_norms_(model: nn.Module) -> None:
    """Make every nn.BatchNorm2d of `model` normalize over all ranks; they stay the same objects."""
    norms = {name: part for name, part in model.named_modules() if isinstance(part, nn.BatchNorm2d)}
    for name, norm in norms.items():
        if type(norm) not in (nn.BatchNorm2d, GroupedBatchNorm2d, SyncedBatchNorm2d):
            raise ConfigError(
                f"{name or 'the model'} is a {type(norm).__name__}; only nn.BatchNorm2d can be synchronized. "
                "Replace it, or use --norm local."
            )
    for norm in norms.values():
        norm.__class__ = SyncedBatchNorm2d


def normalize_synced(norm: nn.BatchNorm2d, pooled: Tensor, branches: int = 1) -> tuple[Tensor, Statistics]:
    """Normalize images of some branches with the statistics of all branches and ranks (see groups.normalize)."""
    y, mean, variance, count = _Synced.apply(pooled, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    n = count // branches
    return y, Statistics(mean[None], variance[None], (variance * (n / max(n - 1, 1)))[None])


class _Synced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCHW: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        dtype = torch.promote_types(x_NCHW.dtype, torch.float32)
        mean, variance = exact_moments(x_NCHW.flatten(2).to(dtype))
        own = x_NCHW.numel() // x_NCHW.shape[1]
        total = _summed(torch.cat([own * mean, own * (variance + mean.square()), mean.new_tensor([own])]))
        count = int(total[-1])
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x_NCHW.shape}")
        mean, square = (total[:-1] / count).view(2, -1)
        variance = (square - mean.square()).clamp_min_(0)
        factor = (variance + eps).rsqrt().to(dtype)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x_NCHW, weight, mean, factor)
        ctx.count, ctx.eps, ctx.has_bias = count, eps, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return F.batch_norm(x_NCHW, mean, variance, weight, bias, eps=eps), mean, variance, count

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_NCHW: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x_NCHW, weight, mean, factor = ctx.saved_tensors
        dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy_NCHW, x_NCHW, weight, None, None, mean, factor, True, ctx.eps, [False, True, True]
        )[1:]
        of_z, of_ones = _summed(torch.stack([dweight, dbias])) / ctx.count  # means over all ranks
        scale = factor if weight is None else factor * weight
        # dx = scale (dy - mean of dy - z mean of dy z), where z = (x - mean) factor
        by_x = -scale * factor * of_z
        shift = -scale * of_ones - by_x * mean
        dx = torch.addcmul(_per_channel(shift), dy_NCHW, _per_channel(scale)).addcmul_(x_NCHW, _per_channel(by_x))
        wanted = weight is not None
        return dx.to(dy_NCHW.dtype), dweight if wanted else None, dbias if ctx.has_bias else None, None


def _per_channel(x_C: Tensor) -> Tensor:
    return x_C[:, None, None]


def _summed(x: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x
