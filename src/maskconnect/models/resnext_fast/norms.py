"""The batch norms of all branches of a module at once, in few operations.

On a CPU the statistics of a batch, from sums and from squares of what is centred, take a fraction of the time of
torch's own. A norm that follows a 1x1 convolution is folded into it while training: the variance of every output is
known exactly from the covariance of the inputs, which are centred for that.

Shape letters: N images, C branches, D channels of all branches together, P pixels; I inputs and O outputs of a 1x1
convolution; V rows of which the last is ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.reference import first_order
from maskconnect.models.resnext_fast.wide import images_at_a_time, parts, times

LEAST_DIGITS = 1000
"""How many times above rounding a folded variance must be; below, the readable path takes it of the outputs."""


Moments = tuple[Tensor, Tensor, int]
"""The mean CI of some channels, their covariance CII, and over how many values a channel these were taken."""


class Norms:
    """Batch norms of one kind, one for each branch."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        self.norms, self.first = norms, norms[0]

    def all_of(self, name: str) -> Tensor:
        """A parameter or statistic of all of them, C x channels."""
        return torch.stack([getattr(norm, name) for norm in self.norms])


class Tracked:
    """How the running statistics of norms will move, once the forward pass has come to a good end."""

    def __init__(self) -> None:
        self.moves: dict[nn.BatchNorm2d, tuple[Norms, list[Tensor], list[Tensor]]] = {}
        self.doubts: list[Tensor] = []  # numbers that are finite if the pass is good

    def doubt(self, x: Tensor) -> None:
        """Ask that all of x be finite."""
        self.doubts.append(x.detach().sum())

    def is_good(self) -> bool:
        """Whether all is finite that should be."""
        return self.doubts[0].is_meta or bool(torch.stack(self.doubts).isfinite().all())

    def note(self, norms: Norms, mean: Tensor, variance: Tensor, count: int) -> None:
        """The statistics of a group of images for all norms, of so many values a channel; the variance is biased."""
        unbiased = variance.detach() * (count / max(count - 1, 1))
        _, means, variances = self.moves.setdefault(norms.first, (norms, [], []))
        means.append(mean.detach())
        variances.append(unbiased)

    @torch.no_grad()
    def move_(self) -> None:
        """Move them once, by the mean over groups, as nn.BatchNorm2d does."""
        for norms, *statistics in self.moves.values():
            for name, groups in zip(("running_mean", "running_var"), statistics, strict=True):
                running = [getattr(norm, name) for norm in norms.norms]
                new = torch.stack(groups).mean(0).reshape(len(running), -1).unbind()
                torch._foreach_lerp_(running, new, cast(float, norms.first.momentum))
            torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in norms.norms], 1)


def normalised(x_NDHW: Tensor, norms: Norms, tracked: Tracked, *, relu: bool, branches: int = 1) -> Tensor:
    """All channels, normalised, and through a ReLU if asked for; images may be those of several branches."""
    first = norms.first
    weight, bias = norms.all_of("weight").flatten(), norms.all_of("bias").flatten()
    if not first.training:
        mean, variance = norms.all_of("running_mean").flatten(), norms.all_of("running_var").flatten()
        z = F.batch_norm(x_NDHW, mean, variance, weight, bias, eps=first.eps)
        return F.relu_(z) if relu else z
    y: Tensor
    y, mean, variance = _Normalised.apply(x_NDHW, weight, bias, first.eps, relu)  # type: ignore[no-untyped-call]
    tracked.note(norms, mean, variance, x_NDHW.numel() // x_NDHW.shape[1] // branches)
    return y


class _Normalised(torch.autograd.Function):
    """Batch norm and ReLU; also the mean and the biased variance."""

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
    """Of every channel; the variance is biased."""
    mean_D, variance_D = exact_moments(x_NDP)
    return mean_D.to(x_NDP.dtype), variance_D.to(x_NDP.dtype)


def exact_moments(x_NDP: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of every channel, added up over images in float64."""
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
    """1x1 convolutions and the batch norms after them as one: weights COI and shifts CO.

    Args:
        inputs: in train mode, the moments of what the convolutions read. The folded weights are then for inputs that
            are centred.
    """
    first, scale, shift = norms.first, norms.all_of("weight"), norms.all_of("bias")
    if inputs is None:
        mean, variance = norms.all_of("running_mean"), norms.all_of("running_var")
        factor = scale * (variance + first.eps).rsqrt()
        return weight_COI * factor[:, :, None], shift - mean * factor
    mean_CI, covariance_CII, count = inputs
    variance = ((weight_COI @ covariance_CII) * weight_COI).sum(-1)
    with torch.no_grad():  # if inputs cancel, so do the digits of the variance
        apart = (weight_COI.square() @ covariance_CII.diagonal(dim1=1, dim2=2)[:, :, None]).squeeze(-1)
        lost = variance + first.eps < LEAST_DIGITS * torch.finfo(variance.dtype).eps * apart
        tracked.doubt(torch.where(lost, torch.nan, 0.0))
    variance = variance.clamp_min(0)
    tracked.note(norms, (weight_COI.detach() @ mean_CI[:, :, None]).squeeze(-1), variance, count)
    return weight_COI * (scale * (variance + first.eps).rsqrt())[:, :, None], shift


def rows_of(parts_NCIHW: Sequence[Tensor]) -> Tensor:
    """The parts one below the other and a row of ones, NCVP, as they are: for eval mode."""
    N, C, _, H, W = parts_NCIHW[0].shape
    return torch.cat([*parts_NCIHW, parts_NCIHW[0].new_ones(1).expand(N, C, 1, H, W)], 2).flatten(3)


def centred_rows(parts_NCIHW: Sequence[Tensor], alive: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """The same, centred, and the means: of the first part for each branch, CI; of another one for all that are alive.

    Branches that are not alive must have no gradient.
    """
    h_NCVHW, *means = _CentredRows.apply(list(alive), *parts_NCIHW)  # type: ignore[no-untyped-call]
    return h_NCVHW.flatten(3), means


class _CentredRows(torch.autograd.Function):
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
    """Of every two rows of a branch, which are centred: CVV."""
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
    """In which sums over images are kept: float64, where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
