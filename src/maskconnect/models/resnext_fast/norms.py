"""The batch norms of all branches of a module at once, in few operations.

On a CPU, computing batch statistics from sums and centered squares takes a fraction of the time of torch's batch norm.
A norm that follows a 1x1 convolution is folded into it while training: the covariance of the centered inputs gives the
exact variance of every output.

Shape letters: N images, C branches, D channels of all branches together, P pixels; I inputs and O outputs of a 1x1
convolution; V rows, of which the last is ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.reference import first_order
from maskconnect.models.resnext_fast.products import images_at_a_time, parts, times

LEAST_DIGITS = 1000
"""A folded variance must be this many times the rounding error; otherwise the reference path computes it."""


Moments = tuple[Tensor, Tensor, int]
"""The mean CI of some channels, their covariance CII, and the number of values per channel."""


class Norms:
    """Batch norms of one kind, one per branch."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        self.norms, self.first = norms, norms[0]

    def all_of(self, name: str) -> Tensor:
        """Return a parameter or statistic of all of them, C x channels."""
        return torch.stack([getattr(norm, name) for norm in self.norms])


class Tracked:
    """Updates of running statistics, applied when the forward pass has succeeded."""

    def __init__(self) -> None:
        self.moves: dict[nn.BatchNorm2d, tuple[Norms, list[Tensor], list[Tensor]]] = {}
        self.sums: list[Tensor] = []  # finite if the pass has succeeded

    def require_finite(self, x: Tensor) -> None:
        """Require that all of x is finite."""
        self.sums.append(x.detach().sum())

    def all_finite(self) -> bool:
        """Return whether everything is finite that must be."""
        return self.sums[0].is_meta or bool(torch.stack(self.sums).isfinite().all())

    def note(self, norms: Norms, mean: Tensor, variance: Tensor, count: int) -> None:
        """Add the statistics of a group of images, from `count` values per channel; the variance is biased."""
        unbiased = variance.detach() * (count / max(count - 1, 1))
        _, means, variances = self.moves.setdefault(norms.first, (norms, [], []))
        means.append(mean.detach())
        variances.append(unbiased)

    @torch.no_grad()
    def move_(self) -> None:
        """Update them once with the mean over groups, as nn.BatchNorm2d does."""
        for norms, *statistics in self.moves.values():
            for name, groups in zip(("running_mean", "running_var"), statistics, strict=True):
                running = [getattr(norm, name) for norm in norms.norms]
                new = torch.stack(groups).mean(0).reshape(len(running), -1).unbind()
                torch._foreach_lerp_(running, new, cast(float, norms.first.momentum))
            torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in norms.norms], 1)


def normalized(x_NDHW: Tensor, norms: Norms, tracked: Tracked, *, relu: bool, branches: int = 1) -> Tensor:
    """Normalize all channels, and apply a ReLU if asked; the images may be those of several branches."""
    first = norms.first
    weight, bias = norms.all_of("weight").flatten(), norms.all_of("bias").flatten()
    if not first.training:
        mean, variance = norms.all_of("running_mean").flatten(), norms.all_of("running_var").flatten()
        z = F.batch_norm(x_NDHW, mean, variance, weight, bias, eps=first.eps)
        return F.relu_(z) if relu else z
    y: Tensor
    y, mean, variance = _Normalized.apply(x_NDHW, weight, bias, first.eps, relu)  # type: ignore[no-untyped-call]
    tracked.note(norms, mean, variance, x_NDHW.numel() // x_NDHW.shape[1] // branches)
    return y


class _Normalized(torch.autograd.Function):
    """Batch norm and ReLU; also returns the mean and the biased variance."""

    @staticmethod
    def forward(
        ctx: Any, x_NDHW: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = mean_and_variance(x_NDHW.flatten(2))
        y = F.batch_norm(x_NDHW, mean, variance, weight, bias, eps=eps)
        if relu:
            y.clamp_min_(0)
        ctx.eps, ctx.relu = eps, relu
        ctx.save_for_backward(x_NDHW, weight, mean, (variance + eps).rsqrt(), y if relu else None)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor, *statistics: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, factor, y = ctx.saved_tensors
        if y is not None:
            dy = torch.ops.aten.threshold_backward(dy, y, 0)
        found = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, factor, True, ctx.eps, [True, True, True]
        )
        return *found, None, None


def mean_and_variance(x_NDP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of every channel."""
    mean_D, variance_D = exact_moments(x_NDP)
    return mean_D.to(x_NDP.dtype), variance_D.to(x_NDP.dtype)


def exact_moments(x_NDP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of every channel, summed over images in float64."""
    N, D, P = x_NDP.shape
    exact = exact_dtype(x_NDP)
    mean_D = x_NDP.sum(-1).sum(0, dtype=exact) / (N * P)
    norms = [
        torch.linalg.vector_norm(x_NDP[part] - mean_D[:, None].to(x_NDP.dtype), dim=-1)
        for part in parts(N, images_at_a_time(x_NDP, 8 * D * P))
    ]
    squares_D = torch.cat(norms).to(exact).square().sum(0)
    return mean_D, squares_D / (N * P)


def folded(weight_COI: Tensor, norms: Norms, inputs: Moments | None, tracked: Tracked) -> tuple[Tensor, Tensor]:
    """Fold batch norms into the 1x1 convolutions before them: return weights COI and shifts CO.

    Args:
        inputs: in train mode, the moments of the inputs of the convolutions. The folded weights then expect centered
            inputs.
    """
    first, scale, shift = norms.first, norms.all_of("weight"), norms.all_of("bias")
    if inputs is None:
        mean, variance = norms.all_of("running_mean"), norms.all_of("running_var")
        factor = scale * (variance + first.eps).rsqrt()
        return weight_COI * factor[:, :, None], shift - mean * factor
    mean_CI, covariance_CII, count = inputs
    variance = ((weight_COI @ covariance_CII) * weight_COI).sum(-1)
    with torch.no_grad():  # if inputs cancel, the variance loses its digits
        uncorrelated = (weight_COI.square() @ covariance_CII.diagonal(dim1=1, dim2=2)[:, :, None]).squeeze(-1)
        lost = variance + first.eps < LEAST_DIGITS * torch.finfo(variance.dtype).eps * uncorrelated
        tracked.require_finite(torch.where(lost, torch.nan, 0.0))
    variance = variance.clamp_min(0)
    tracked.note(norms, (weight_COI.detach() @ mean_CI[:, :, None]).squeeze(-1), variance, count)
    return weight_COI * (scale * (variance + first.eps).rsqrt())[:, :, None], shift


def rows_of(parts_NCIHW: Sequence[Tensor]) -> Tensor:
    """Stack the parts and a row of ones, NCVP, without centering: for eval mode."""
    N, C, _, H, W = parts_NCIHW[0].shape
    return torch.cat([*parts_NCIHW, parts_NCIHW[0].new_ones(1).expand(N, C, 1, H, W)], 2).flatten(3)


def centered_rows(parts_NCIHW: Sequence[Tensor], alive: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the rows centered, and their means: of the first part per branch, CI; of others over live branches.

    Dead branches must have no gradient.
    """
    h_NCVHW, *means = _CenteredRows.apply(list(alive), *parts_NCIHW)  # type: ignore[no-untyped-call]
    return h_NCVHW.flatten(3), means


class _CenteredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alive: list[int], *parts_NCIHW: Tensor) -> tuple[Tensor, ...]:
        N, C, _, H, W = parts_NCIHW[0].shape
        ctx.sizes, ctx.alive = [part.shape[2] for part in parts_NCIHW], alive
        h_NCVHW = parts_NCIHW[0].new_empty(N, C, sum(ctx.sizes) + 1, H, W)
        h_NCVHW[:, :, -1] = 1
        means = []
        for place, (part, rows) in enumerate(zip(parts_NCIHW, torch.split(h_NCVHW, [*ctx.sizes, 1], 2), strict=False)):
            mean_CI = part.sum((-2, -1)).sum(0, dtype=exact_dtype(part)) / (N * H * W)
            if place:
                mean_CI = mean_CI[alive].mean(0, keepdim=True)
            means.append(mean_CI.to(part.dtype))
            torch.sub(part, means[-1][:, :, None, None], out=rows)
        ctx.mark_non_differentiable(*means)
        return h_NCVHW, *means

    @staticmethod
    @first_order
    def backward(ctx: Any, dh_NCVHW: Tensor, *means: None) -> tuple[Tensor | None, ...]:
        found, count = [], dh_NCVHW[:, 0, 0].numel()
        for place, rows in enumerate(torch.split(dh_NCVHW, [*ctx.sizes, 1], 2)[:-1]):
            mean_CI = rows.sum((-2, -1)).sum(0) / count
            if place:
                pooled_I = mean_CI.sum(0) / len(ctx.alive)
                mean_CI = torch.zeros_like(mean_CI)
                mean_CI[ctx.alive] = pooled_I
            found.append(rows - mean_CI[:, :, None, None])
        return None, *found


def covariances(h_NCVP: Tensor) -> Tensor:
    """Return the covariance of every two rows of a branch, CVV; rows must be centered."""
    products: Tensor = _Covariances.apply(h_NCVP)  # type: ignore[no-untyped-call]
    return products


class _Covariances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_NCVP: Tensor) -> Tensor:
        ctx.save_for_backward(h_NCVP)
        N, C, V, P = h_NCVP.shape
        exact = exact_dtype(h_NCVP)
        few = images_at_a_time(h_NCVP, C * V * V)
        products_CVV = h_NCVP.new_zeros(C, V, V, dtype=exact)
        for part in parts(N, few):
            products_CVV += (h_NCVP[part] @ h_NCVP[part].mT).sum(0, dtype=exact)
        return (products_CVV / (N * P)).to(h_NCVP.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_CVV: Tensor) -> Tensor:
        (h_NCVP,) = ctx.saved_tensors
        N, _, _, P = h_NCVP.shape
        dh_NCVP = torch.empty_like(h_NCVP)
        times((grad_CVV + grad_CVV.mT) / (N * P), h_NCVP, out=dh_NCVP)
        return dh_NCVP


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over images: float64, if the device supports it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
