"""The wide part of a ResNeXt module, forward and backward, a few images at a time.

Between the bottlenecks of two modules every branch has an input of its own, so that all tensors are C times as wide as
in plain ResNeXt. What happens there (D2), with the batch norm folded into the last 1x1 convolution, is

    f_k = A_k h_k + s S_k        x_j = ReLU( sum_k m_jk f_k )        u_j = B_j x_j

with h_k the bottleneck of branch k (and a row of ones, for the shift), S_k its shortcut, s = 1/K, and B_j the first 1x1
convolution of the next module. Here no image depends on another, so all of it is done for a few images while their
tensors are in the cache; of the wide tensors only x and its gradient go to memory. Backward f is made again, unless
the shortcuts are among the rows of h: that would take longer than to read it.

Where memory is short, not even x is kept: backward it is made again from the h of this module and of those before,
back to a module whose shortcuts are kept (`Again`).

Shape letters: N images, C branches, T branches that read them, V rows of h, O output channels of a branch, R channels
of the next bottleneck, P pixels; B images at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskconnect.core.reference import first_order

IN_CACHE = 16 * 2**20
"""How many bytes a wide tensor of a few images may have on a CPU."""

ELSEWHERE = 256 * 2**20
"""The same on other devices, where to start an operation is dear."""

FEW_PIXELS, MANY_IMAGES = 16, 16
"""Up to how many pixels an image is small, and from how many such images on they are worth a product together."""


@dataclass(frozen=True)
class Factors:
    """What x is made of, besides shortcuts; all of it narrow."""

    h_NCVP: Tensor
    a_COV: Tensor
    m_TC: Tensor
    share: float


@dataclass(frozen=True)
class Again:
    """How to make the shortcuts of a module again: from those of an earlier one, by way of the modules in between."""

    start_NCOP: Tensor | None
    modules: tuple[Factors, ...] = ()

    def then(self, module: Factors) -> Again:
        """The same for the next module."""
        return Again(self.start_NCOP, (*self.modules, module))


def join(
    factors: Factors, s_NCOP: Tensor | None, b_TRO: Tensor | None, again: Again | None = None
) -> tuple[Tensor, Tensor | None]:
    """x and u of a module.

    Args:
        factors: the bottlenecks and whatever else is multiplied by folded weights, these, the masks, and 1/K.
        s_NCOP: the shortcuts where they are not among the rows; one for all branches (N1OP) where all have the same.
        b_TRO: weights of the next module; without one there is no u.
        again: how to make the shortcuts again, so that no wide tensor is kept.
    """
    h_NCVP, a_COV, m_TC, share = factors.h_NCVP, factors.a_COV, factors.m_TC, factors.share
    x_NTOP, u_NTRP = _Join.apply(h_NCVP, a_COV, s_NCOP, m_TC, b_TRO, share, again)  # type: ignore[no-untyped-call]
    return x_NTOP, u_NTRP


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_NCVP: Tensor,
        a_COV: Tensor,
        s_NCOP: Tensor | None,
        m_TC: Tensor,
        b_TRO: Tensor | None,
        share: float,
        again: Again | None,
    ) -> tuple[Tensor, Tensor | None]:
        (N, C, _, P), outputs, T = h_NCVP.shape, a_COV.shape[1], len(m_TC)
        x_NTOP = h_NCVP.new_empty(N, T, outputs, P)
        u_NTRP = None if b_TRO is None else h_NCVP.new_empty(N, T, b_TRO.shape[1], P)
        learning = ctx.needs_input_grad[3]
        keeps_f = learning and s_NCOP is None and again is None
        few = images_at_a_time(h_NCVP, C * outputs * P)
        f_NCOP = h_NCVP.new_empty(N if keeps_f else few, C, outputs, P)
        for part in parts(N, few):
            f = f_NCOP[part] if keeps_f else f_NCOP[: part.stop - part.start]
            _branches(h_NCVP[part], a_COV, _some(s_NCOP, part), share, out=f)
            _mix(m_TC, f, out=x_NTOP[part])
            x_NTOP[part].clamp_min_(0)
            if b_TRO is not None and u_NTRP is not None:
                times(b_TRO, x_NTOP[part], out=u_NTRP[part])
        ctx.share, ctx.learning, ctx.lean = share, learning, again is not None
        ctx.branches_of_s = 0 if s_NCOP is None else s_NCOP.shape[1]
        ctx.set_materialize_grads(False)
        kept = [f_NCOP if keeps_f else None, s_NCOP if learning else None, x_NTOP]
        if again is not None:
            kept = [None, again.start_NCOP, None]
            ctx.shares = [module.share for module in again.modules]
            kept += [t for module in again.modules for t in (module.h_NCVP, module.a_COV, module.m_TC)]
        ctx.save_for_backward(h_NCVP, a_COV, m_TC, b_TRO, *kept)
        return x_NTOP, u_NTRP

    @staticmethod
    @first_order
    def backward(ctx: Any, dx_NTOP: Tensor | None, du_NTRP: Tensor | None) -> tuple[Tensor | None, ...]:
        h_NCVP, a_COV, m_TC, b_TRO, f_NCOP, s_NCOP, x_NTOP, *earlier = ctx.saved_tensors
        again = None
        if ctx.lean:
            triples = zip(earlier[::3], earlier[1::3], earlier[2::3], ctx.shares, strict=True)
            again = Again(s_NCOP, tuple(Factors(*triple) for triple in triples))
        (N, C, _, P), outputs, T = h_NCVP.shape, a_COV.shape[1], len(m_TC)
        few = images_at_a_time(h_NCVP, C * outputs * P)
        dh_NCVP = torch.empty_like(h_NCVP)
        ds_NCOP = h_NCVP.new_empty(N, ctx.branches_of_s, outputs, P)
        g_BTOP, f_BCOP = h_NCVP.new_empty(few, T, outputs, P), h_NCVP.new_empty(few, C, outputs, P)
        # Sums over images: where that is little, each of the few has its own.
        dm_BTC, da_BCOV = h_NCVP.new_zeros(few, T, C), _sums(a_COV, f_BCOP)
        db_BTRO = None if du_NTRP is None else _sums(b_TRO, g_BTOP)
        # df is made as share * df, which is the gradient of a shortcut; what comes of it is divided again.
        back_CT, a_CVO = (m_TC * ctx.share).mT, (a_COV / ctx.share).mT
        for part in parts(N, few):
            h, g, f = h_NCVP[part], g_BTOP[: part.stop - part.start], f_BCOP[: part.stop - part.start]
            if f_NCOP is not None:
                f = f_NCOP[part]
            elif again is not None or ctx.learning:
                s = _some(s_NCOP, part) if again is None else _shortcuts(again, part)
                _branches(h, a_COV, s, ctx.share, out=f)
            x = x_NTOP[part] if again is None else _mixed(m_TC, f)
            dx = _some(dx_NTOP, part)
            if du_NTRP is not None and db_BTRO is not None:
                times(b_TRO.mT, du_NTRP[part], out=g, plus=dx)
                _add_products(db_BTRO, du_NTRP[part], x)
                dx = g
            torch.ops.aten.threshold_backward.grad_input(dx, x, 0, grad_input=g)
            if ctx.learning:
                dm_BTC[: len(f)].baddbmm_(g.flatten(2), f.flatten(2).mT)
            df = ds_NCOP[part] if ctx.branches_of_s == C else f_BCOP[: len(f)]
            _mix(back_CT, g, out=df)
            if 0 < ctx.branches_of_s < C:
                torch.sum(df, 1, keepdim=True, out=ds_NCOP[part])
            _add_products(da_BCOV, df, h)
            times(a_CVO, df, out=dh_NCVP[part])
        return (
            dh_NCVP,
            da_BCOV.sum(0) / ctx.share,
            ds_NCOP if ctx.branches_of_s else None,
            dm_BTC.sum(0) if ctx.learning else None,
            None if db_BTRO is None else db_BTRO.sum(0),
            None,
            None,
        )


def _shortcuts(again: Again, part: slice) -> Tensor | None:
    """The shortcuts of a few images, made again."""
    s = _some(again.start_NCOP, part)
    for module in again.modules:
        h = module.h_NCVP[part]
        f = h.new_empty(*h.shape[:2], module.a_COV.shape[1], h.shape[3])
        _branches(h, module.a_COV, s, module.share, out=f)
        s = _mixed(module.m_TC, f)
    return s


def _mixed(m_TC: Tensor, f: Tensor) -> Tensor:
    """x of a few images."""
    x = f.new_empty(len(f), len(m_TC), *f.shape[2:])
    _mix(m_TC, f, out=x)
    return x.clamp_min_(0)


def _some(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def images_at_a_time(like: Tensor, numbers: int) -> int:
    """How many images to do at once, if a wide tensor has so many numbers an image."""
    room = IN_CACHE if like.device.type == "cpu" else ELSEWHERE
    return max(1, min(len(like), room // (numbers * like.element_size())))


def _sums(weight: Tensor, wide: Tensor) -> Tensor:
    return weight.new_zeros(len(wide) if _is_small(weight, wide) else 1, *weight.shape)


def parts(images: int, few: int) -> Iterator[slice]:
    """All images, a few at a time."""
    return (slice(start, min(start + few, images)) for start in range(0, images, few))


def _branches(h: Tensor, a_COV: Tensor, s: Tensor | None, share: float, *, out: Tensor) -> None:
    """f of every branch."""
    if s is not None and s.shape[1] == h.shape[1]:
        times(a_COV, h, out=out, plus=s, share=share)
        return
    times(a_COV, h, out=out)
    if s is not None:
        out.add_(s, alpha=share)


def _mix(m: Tensor, f: Tensor, out: Tensor) -> None:
    """Sums of branches of every image."""
    torch.bmm(_for_each(m, len(f)), f.flatten(2), out=out.flatten(2))


def times(weight: Tensor, x: Tensor, *, out: Tensor, plus: Tensor | None = None, share: float = 1.0) -> None:
    """Every branch of every image multiplied by the weight of the branch; `plus` what is to be added, times `share`."""
    if len(x) > 1 and not _is_small(weight, out):
        if _few_pixels(x):
            y_COBP = torch.bmm(weight, _together(x)).view(*weight.shape[:2], len(x), -1)
            y_BCOP = y_COBP.permute(2, 0, 1, 3)
            out.copy_(y_BCOP) if plus is None else torch.add(y_BCOP, plus, alpha=share, out=out)
            return
        for n in range(len(x)):
            times(weight, x[n : n + 1], out=out[n : n + 1], plus=None if plus is None else plus[n : n + 1], share=share)
        return
    factors = weight if len(x) == 1 else _for_each(weight, len(x)).flatten(0, 1), x.flatten(0, 1)
    if plus is None:
        torch.bmm(*factors, out=out.flatten(0, 1))
    else:
        torch.baddbmm(plus.flatten(0, 1), *factors, beta=share, out=out.flatten(0, 1))


def _add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add to `total` the products of a with b, transposed, for every branch of every image: to one for all images, or
    to one for each.
    """
    if len(total) == 1 and _few_pixels(a):
        total[0].baddbmm_(_together(a), _together(b).mT)
    elif len(total) == 1:
        for n in range(len(a)):
            total[0].baddbmm_(a[n], b[n].mT)
    else:
        total[: len(a)].flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1).mT)


def _few_pixels(x: Tensor) -> bool:
    """Whether images are so small, and so many, that single products are slow: better all in one, for a copy."""
    return x.shape[-1] <= FEW_PIXELS and len(x) >= MANY_IMAGES


def _together(x_BCVP: Tensor) -> Tensor:
    """The pixels of all images in one row, CV(BP)."""
    return x_BCVP.permute(1, 2, 0, 3).flatten(2)


def _is_small(weight: Tensor, wide: Tensor) -> bool:
    """Whether a weight may be repeated for each of a few images."""
    return 4 * weight.numel() <= wide[0].numel()


def _for_each(weight: Tensor, images: int) -> Tensor:
    return weight.expand(images, *weight.shape)
