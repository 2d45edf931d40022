"""All branches of a ResNeXt at once: what `core/forward.py` does one by one, in a few wide operations.

Covered is what `mc.resnext` builds with a batch norm a branch, as long as nobody has changed it; anything else is left
to the readable path.

Shape letters: N images, C branches of a module, T branches that read them, O output channels of a branch, H and W of
its image, P = HW pixels, V rows that the last 1x1 convolution reads: the bottleneck, maybe the shortcut, and ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.layerwise import Layer, Reader
from maskconnect.models.groups import groups_of
from maskconnect.models.norms import Norms, Tracked, centred_rows, covariances, folded, normalised, rows_of
from maskconnect.models.wide import Again, Factors, join

if TYPE_CHECKING:
    from maskconnect.models.branches import Branch, SharedProjection

REDUCE, REDUCE_NORM, _, CONV, CONV_NORM, _, EXPAND, EXPAND_NORM = range(8)
"""Where the parts of a branch are in its residual."""

KEPT_EVERY = 3
"""Where memory is short, the inputs of one in so many modules are kept, and of those after a change of shape."""

FOLDED_UP_TO = 128
"""How many channels a shortcut's convolution may read to be folded: covariances grow with the square, norms do not."""


class Module:
    """The branches of a module that run, in order, and those who read them."""

    def __init__(self, layer: Layer, shortcut: SharedProjection | None) -> None:
        self.layer, self.shortcut = layer, shortcut
        self.parts = list(zip(*(cast("Branch", branch).residual for branch in layer.branches.values()), strict=True))

    def weights(self, place: int) -> Tensor:
        """Of the convolutions of all branches, C x outputs x inputs x kernel."""
        return torch.stack([cast(Tensor, conv.weight) for conv in self.parts[place]])

    def pointwise(self, place: int) -> Tensor:
        """The same of 1x1 convolutions, as matrices."""
        return self.weights(place).flatten(2)

    def norms(self, place: int) -> Norms:
        """The batch norms of all branches."""
        return Norms([cast(nn.BatchNorm2d, norm) for norm in self.parts[place]])

    @property
    def training(self) -> bool:
        """Whether its norms take the statistics of the batch."""
        return bool(self.parts[EXPAND_NORM][0].training)

    @property
    def alive(self) -> list[int]:
        """Which of the branches that run can reach the output, by place."""
        return [place for place, branch in enumerate(self.layer.branches) if branch in self.layer.alive]

    @property
    def fan_in(self) -> int:
        """K, of every reader."""
        return self.layer.readers[0].fan_in

    def masks(self, like: Tensor) -> Tensor:
        """What every reader reads, TC; while masks are learned, with a gradient."""
        columns = {branch: column for column, branch in enumerate(self.layer.branches)}
        return torch.stack([_row(reader, columns, like) for reader in self.layer.readers])


def _row(reader: Reader, columns: Mapping[int, int], like: Tensor) -> Tensor:
    if reader.mask_S is not None and reader.candidates == tuple(columns):
        return reader.mask_S.to(like.dtype)
    read = [
        columns[k] for k, on in zip(reader.candidates, reader.active, strict=True) if on or reader.mask_S is not None
    ]
    at = torch.tensor(read, device=like.device)
    values = like.new_ones(len(read)) if reader.mask_S is None else reader.mask_S.to(like.dtype)
    return like.new_zeros(len(columns)).index_copy(0, at, values)


def run(modules: Sequence[Module], x_NIHW: Tensor, *, lean: bool) -> tuple[Tensor, Tensor] | None:
    """What the first branch of the second module reads, and the output; None where something was not finite.

    A matrix product reads a source also where its mask is zero, so that one that is not finite would spoil all readers.
    Groups of images whose norms have statistics of their own (`groups.py`) run one after the other.
    """
    tracked, sums, found = Tracked(), list[Tensor](), []
    G = groups_of(modules[0].norms(REDUCE_NORM).first, len(x_NIHW)) if modules[0].training else 1
    for group in range(G):
        one = _run_group(modules, x_NIHW[group::G].contiguous(), tracked, sums, lean=lean)
        if one is None:
            return None
        found.append(one)
    learning = modules[0].layer.readers[0].mask_S is not None
    if learning and not _all_finite(sums):
        return None
    tracked.move_()
    second, y_NOHW = found[0]
    if G > 1:
        order_N = torch.cat([torch.arange(group, len(x_NIHW), G) for group in range(G)])
        y_NOHW = torch.cat([y for _, y in found]).index_select(0, order_N.argsort().to(x_NIHW.device))
    return second, y_NOHW


def _run_group(
    modules: Sequence[Module], x_NIHW: Tensor, tracked: Tracked, sums: list[Tensor], *, lean: bool
) -> tuple[Tensor, Tensor] | None:
    """The same for a group of images; where a norm would have a single value, None: torch has an error for this."""
    u_NDHW = F.conv2d(x_NIHW, modules[0].weights(REDUCE).flatten(0, 1))
    x_NCOHW, second = x_NIHW[:, None], x_NIHW  # one input for all branches
    again: Again | None = None
    for module, next_module in zip(modules, [*modules[1:], None], strict=True):
        h_NDHW = bottleneck(module, u_NDHW, tracked)
        N, _, H, W = h_NDHW.shape
        if module.training and N * H * W == 1:
            return None
        h_NCVP, a_COV, s_NCOP = wide_inputs(module, h_NDHW, x_NCOHW, tracked, lean=lean)
        sums.append(a_COV.detach().sum())
        b_TRO = None if next_module is None else next_module.pointwise(REDUCE)
        factors = Factors(h_NCVP, a_COV, module.masks(h_NDHW), 1 / module.fan_in)
        if again is None or module.shortcut is not None or len(again.modules) == KEPT_EVERY:
            again = Again(s_NCOP)
        x_NTOP, u_NTRP = join(factors, s_NCOP, b_TRO, again if lean else None)
        again = None if s_NCOP is None else again.then(factors)  # shortcuts among the rows are dear to make
        x_NCOHW = x_NTOP.view(N, -1, x_NTOP.shape[2], H, W)
        if module is modules[0]:
            second = x_NCOHW[:, 0]
        if u_NTRP is not None:
            u_NDHW = u_NTRP.view(N, -1, H, W)
    return second, x_NCOHW[:, 0]


def bottleneck(module: Module, u_NDHW: Tensor, tracked: Tracked) -> Tensor:
    """The bottlenecks of all branches, from the outputs of their first convolutions."""
    v_NDHW = normalised(u_NDHW, module.norms(REDUCE_NORM), tracked, relu=True)
    conv = cast(nn.Conv2d, module.parts[CONV][0])
    weight = module.weights(CONV).flatten(0, 1).contiguous()
    y_NDHW = F.conv2d(v_NDHW, weight, None, conv.stride, conv.padding, groups=len(module.layer.branches))
    return normalised(y_NDHW, module.norms(CONV_NORM), tracked, relu=True)


def wide_inputs(
    module: Module, h_NDHW: Tensor, x_NCOHW: Tensor, tracked: Tracked, *, lean: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `join` needs: rows, folded weights for them, and shortcuts that are not among the rows."""
    C, (N, _, H, W) = len(module.layer.branches), h_NDHW.shape
    h_NCIHW, shortcut = h_NDHW.view(N, C, -1, H, W), module.shortcut
    if shortcut is None:
        s_NCOP: Tensor | None = x_NCOHW.flatten(3)
    elif x_NCOHW.shape[1] == 1 or (not lean and len(module.alive) == C and shortcut.conv.in_channels > FOLDED_UP_TO):
        s_NCOP = projected(shortcut, x_NCOHW, tracked)
    else:
        s_NCOP = None
    rows = [h_NCIHW] if s_NCOP is not None else [h_NCIHW, subsampled(x_NCOHW, cast("SharedProjection", shortcut).conv)]
    own = pooled = None
    if module.training:
        h_NCVP, means = centred_rows(rows, module.alive)
        covariance_CVV, width, count = covariances(h_NCVP), h_NCIHW.shape[2], N * H * W
        own = means[0], covariance_CVV[:, :width, :width], count
        if s_NCOP is None:
            pooled = means[1], covariance_CVV[module.alive, width:-1, width:-1].mean(0, keepdim=True), count
    else:
        h_NCVP = rows_of(rows)
    a_COI, shift_CO = folded(module.pointwise(EXPAND), module.norms(EXPAND_NORM), own, tracked)
    if s_NCOP is None:
        assert shortcut is not None
        weight_1OI = shortcut.conv.weight.flatten(1)[None]
        a_1OI, shift_1O = folded(weight_1OI, Norms([shortcut.norm.norm]), pooled, tracked)
        a_COI = torch.cat([a_COI, (a_1OI / module.fan_in).expand(C, -1, -1)], 2)
        shift_CO = shift_CO + shift_1O / module.fan_in
    return h_NCVP, torch.cat([a_COI, shift_CO[:, :, None]], 2), s_NCOP


def projected(shortcut: SharedProjection, x_NCOHW: Tensor, tracked: Tracked) -> Tensor:
    """The shortcuts of all branches, normalised together."""
    read = subsampled(x_NCOHW, shortcut.conv).contiguous()
    N, C, *_ = read.shape
    y = F.conv2d(read.flatten(0, 1), shortcut.conv.weight.contiguous())
    y = normalised(y, Norms([shortcut.norm.norm]), tracked, relu=False, branches=C)
    return y.view(N, C, y.shape[1], -1)


def subsampled(x_NCOHW: Tensor, conv: nn.Conv2d) -> Tensor:
    """What a 1x1 convolution reads."""
    vertical, horizontal = conv.stride
    return x_NCOHW[:, :, :, ::vertical, ::horizontal]


def _all_finite(sums: Sequence[Tensor]) -> bool:
    return sums[0].is_meta or bool(torch.stack(list(sums)).isfinite().all())
