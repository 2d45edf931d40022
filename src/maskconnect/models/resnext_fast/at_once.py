"""All branches of a ResNeXt at once: what `MaskedStack.forward` does one by one, in a few wide operations.

This covers unchanged networks that `mc.resnext` builds with a batch norm per branch; all else takes the reference
path.

Shape letters: N images, C branches of a module, T branches that read them, O output channels of a branch, H and W of
its image, P = HW pixels, V rows that the last 1x1 convolution reads: the bottleneck, possibly the shortcut, and ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.layers import Layer, Reader
from maskconnect.models.groups import groups_of
from maskconnect.models.resnext_fast.norms import (
    Moments,
    Norms,
    Tracked,
    centered_rows,
    covariances,
    folded,
    normalized,
    rows_of,
)
from maskconnect.models.resnext_fast.wide import Factors, Recompute, join

if TYPE_CHECKING:
    from maskconnect.models.branches import Branch, SharedProjection

REDUCE, REDUCE_NORM, _, CONV, CONV_NORM, _, EXPAND, EXPAND_NORM = range(8)
"""The positions of the parts of a branch in its residual."""

KEPT_EVERY = 3
"""With `lean`, the inputs of every third module are kept, and of modules after a change of shape."""

FOLDED_UP_TO = 128
"""The most input channels for which a shortcut is folded: covariances grow with their square, norms do not."""


class Branched:
    """The branches of a module that run, in order, and their readers."""

    def __init__(self, layer: Layer, shortcut: SharedProjection | None) -> None:
        self.layer, self.shortcut = layer, shortcut
        self.parts = list(zip(*(cast("Branch", branch).residual for branch in layer.branches.values()), strict=True))

    def weights(self, place: int) -> Tensor:
        """Return the weights of the convolutions of all branches, C x outputs x inputs x kernel."""
        return torch.stack([cast(Tensor, conv.weight) for conv in self.parts[place]])

    def pointwise(self, place: int) -> Tensor:
        """Return the weights of 1x1 convolutions as matrices."""
        return self.weights(place).flatten(2)

    def norms(self, place: int) -> Norms:
        """Return the batch norms of all branches."""
        return Norms([cast(nn.BatchNorm2d, norm) for norm in self.parts[place]])

    @property
    def training(self) -> bool:
        """Whether its norms use the statistics of the batch."""
        return bool(self.parts[EXPAND_NORM][0].training)

    @property
    def alive(self) -> list[int]:
        """The positions of the running branches that can reach the output."""
        return [place for place, branch in enumerate(self.layer.branches) if branch in self.layer.alive]

    @property
    def fan_in(self) -> int:
        """K of every reader."""
        return self.layer.readers[0].fan_in

    def masks(self, like: Tensor) -> Tensor:
        """Return the mask of every reader, TC; with a gradient while masks learn."""
        columns = {branch: column for column, branch in enumerate(self.layer.branches)}
        return torch.stack([_row(reader, columns, like) for reader in self.layer.readers])


def _row(reader: Reader, columns: Mapping[int, int], like: Tensor) -> Tensor:
    """Return the mask of one reader."""
    if reader.mask_S is None:
        read = [columns[k] for k, on in zip(reader.candidates, reader.active, strict=True) if on]
        values = like.new_ones(len(read))
    elif reader.candidates == tuple(columns):
        return reader.mask_S.to(like.dtype)
    else:
        read, values = [columns[k] for k in reader.candidates], reader.mask_S.to(like.dtype)
    return like.new_zeros(len(columns)).index_copy(0, torch.tensor(read, device=like.device), values)


def run(modules: Sequence[Branched], x_NIHW: Tensor, *, lean: bool) -> Tensor | None:
    """Return the output of the stack; None if the reference path must compute it.

    A matrix product also reads sources whose mask is zero, so a source that is not finite would affect all readers.

    Groups of images with separate statistics (`groups.py`) run one after the other.
    """
    tracked, found = Tracked(), []
    G = groups_of(modules[0].norms(REDUCE_NORM).first, len(x_NIHW)) if modules[0].training else 1
    for group in range(G):
        one = _run_group(modules, x_NIHW[group::G].contiguous(), tracked, lean=lean)
        if one is None:
            return None
        found.append(one)
    if not tracked.all_finite():
        return None
    tracked.move_()
    if G == 1:
        return found[0]
    order_N = torch.cat([torch.arange(group, len(x_NIHW), G) for group in range(G)])
    return torch.cat(found).index_select(0, order_N.argsort().to(x_NIHW.device))


def _run_group(modules: Sequence[Branched], x_NIHW: Tensor, tracked: Tracked, *, lean: bool) -> Tensor | None:
    """Return the output for a group of images; None if the reference path would raise an error."""
    u_NDHW = F.conv2d(x_NIHW, modules[0].weights(REDUCE).flatten(0, 1))
    x_NCOHW = x_NIHW[:, None]  # one input for all branches
    recompute: Recompute | None = None
    for module, next_module in zip(modules, [*modules[1:], None], strict=True):
        h_NDHW = bottleneck(module, u_NDHW, tracked)
        N, _, H, W = h_NDHW.shape
        if (module.training and N * H * W == 1) or read_by_shortcut(module, x_NCOHW).shape[-2:] != (H, W):
            return None
        h_NCVP, a_COV, s_NCOP = wide_inputs(module, h_NDHW, x_NCOHW, tracked, lean=lean)
        tracked.require_finite(a_COV)
        if not module.training:  # otherwise its statistics are in the weights
            tracked.require_finite(h_NCVP)
        b_TRO = None if next_module is None else next_module.pointwise(REDUCE)
        factors = Factors(h_NCVP, a_COV, module.masks(h_NDHW), 1 / module.fan_in)
        if lean and (recompute is None or module.shortcut is not None or len(recompute.modules) == KEPT_EVERY):
            recompute = Recompute(s_NCOP)
        x_NTOP, u_NTRP = join(factors, s_NCOP, b_TRO, recompute)
        if recompute is not None:
            recompute = (
                None if s_NCOP is None else recompute.then(factors)
            )  # recomputing shortcuts among the rows is slow
        x_NCOHW = x_NTOP.view(N, -1, x_NTOP.shape[2], H, W)
        if u_NTRP is not None:
            u_NDHW = u_NTRP.view(N, -1, H, W)
    return x_NCOHW[:, 0]


def bottleneck(module: Branched, u_NDHW: Tensor, tracked: Tracked) -> Tensor:
    """Return the bottlenecks of all branches, from the outputs of their first convolutions."""
    v_NDHW = normalized(u_NDHW, module.norms(REDUCE_NORM), tracked, relu=True)
    conv = cast(nn.Conv2d, module.parts[CONV][0])
    weight = module.weights(CONV).flatten(0, 1).contiguous()
    y_NDHW = F.conv2d(v_NDHW, weight, None, conv.stride, conv.padding, groups=len(module.layer.branches))
    return normalized(y_NDHW, module.norms(CONV_NORM), tracked, relu=True)


def wide_inputs(
    module: Branched, h_NDHW: Tensor, x_NCOHW: Tensor, tracked: Tracked, *, lean: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of `join`: rows, their folded weights, and shortcuts that are not among the rows."""
    C, (N, _, H, W) = len(module.layer.branches), h_NDHW.shape
    h_NCIHW, shortcut = h_NDHW.view(N, C, -1, H, W), module.shortcut
    if shortcut is None or not is_folded(module, x_NCOHW, lean=lean):
        h_NCVP, (moments,) = _rows(module, [h_NCIHW])
        a_COI, shift_CO = folded(module.pointwise(EXPAND), module.norms(EXPAND_NORM), moments, tracked)
        s_NCOP = x_NCOHW.flatten(3) if shortcut is None else projected(module, shortcut, x_NCOHW, tracked)
    else:
        h_NCVP, (moments, pooled) = _rows(module, [h_NCIHW, read_by_shortcut(module, x_NCOHW)])
        a_COI, shift_CO = folded(module.pointwise(EXPAND), module.norms(EXPAND_NORM), moments, tracked)
        weight_1OI, norm = shortcut.conv.weight.flatten(1)[None], Norms([shortcut.norm.norm])
        a_1OI, shift_1O = folded(weight_1OI, norm, pooled, tracked)
        a_COI = torch.cat([a_COI, (a_1OI / module.fan_in).expand(C, -1, -1)], 2)
        shift_CO, s_NCOP = shift_CO + shift_1O / module.fan_in, None
    return h_NCVP, torch.cat([a_COI, shift_CO[:, :, None]], 2), s_NCOP


def is_folded(module: Branched, x_NCOHW: Tensor, *, lean: bool) -> bool:
    """Return whether the weights of a projection become columns of the branches' weights.

    They do not if all branches have one input. Otherwise they do if that is cheap, if its outputs must not be kept, or
    if a branch is dead, because its outputs must not affect the statistics.
    """
    assert module.shortcut is not None
    cheap = module.shortcut.conv.in_channels <= FOLDED_UP_TO
    return x_NCOHW.shape[1] > 1 and (cheap or lean or len(module.alive) < len(module.layer.branches))


def _rows(module: Branched, parts_NCIHW: Sequence[Tensor]) -> tuple[Tensor, list[Moments | None]]:
    """Return the parts as rows, and in train mode their moments: of the first per branch, of others pooled."""
    if not module.training:
        return rows_of(parts_NCIHW), [None for _ in parts_NCIHW]
    h_NCVP, means = centered_rows(parts_NCIHW, module.alive)
    covariance_CVV, width, count = covariances(h_NCVP), means[0].shape[1], h_NCVP[:, 0, 0].numel()
    moments: list[Moments | None] = [(means[0], covariance_CVV[:, :width, :width], count)]
    for mean_1I in means[1:]:
        moments.append((mean_1I, covariance_CVV[module.alive, width:-1, width:-1].mean(0, keepdim=True), count))
    return h_NCVP, moments


def projected(module: Branched, shortcut: SharedProjection, x_NCOHW: Tensor, tracked: Tracked) -> Tensor:
    """Return the shortcuts of all branches, normalized together."""
    read = read_by_shortcut(module, x_NCOHW).contiguous()
    N, C, *_ = read.shape
    y = F.conv2d(read.flatten(0, 1), shortcut.conv.weight.contiguous())
    y = normalized(y, Norms([shortcut.norm.norm]), tracked, relu=False, branches=C)
    return y.view(N, C, y.shape[1], -1)


def read_by_shortcut(module: Branched, x_NCOHW: Tensor) -> Tensor:
    """Return the positions of the inputs that the shortcuts read."""
    vertical, horizontal = (1, 1) if module.shortcut is None else module.shortcut.conv.stride
    return x_NCOHW[:, :, :, ::vertical, ::horizontal]
