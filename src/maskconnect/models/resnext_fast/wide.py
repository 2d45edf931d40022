"""The wide part of a ResNeXt module, forward and backward, a few images at a time.

Between the bottlenecks of two modules every branch has its own input, so all tensors are C times as wide as in plain
ResNeXt. With the batch norm folded into the last 1x1 convolution, this part computes (D2)

    f_k = A_k h_k + s S_k        x_j = ReLU( sum_k m_jk f_k )        u_j = B_j x_j

where h_k is the bottleneck of branch k (and a row of ones, for the shift), S_k its shortcut, s = 1/K, and B_j the first
1x1 convolution of the next module. No image depends on another here, so all of it is computed for a few images while
their tensors are in the cache; of the wide tensors, only x and its gradient go to memory. The backward pass recomputes
f, unless the shortcuts are among the rows of h: then reading f is faster.

With `lean`, not even x is kept: the backward pass recomputes it from the h of this module and of earlier ones, back to
a module whose shortcuts are kept (`Recompute`).

Shape letters: N images, C branches, T branches that read them, V rows of h, O output channels of a branch, R channels
of the next bottleneck, P pixels; B images at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskconnect.core.reference import first_order
from maskconnect.models.resnext_fast.products import add_products, for_each, images_at_a_time, parts, sums_like, times


@dataclass(frozen=True)
class Factors:
    """The narrow tensors from which x is computed, besides shortcuts."""

    h_NCVP: Tensor
    a_COV: Tensor
    m_TC: Tensor
    share: float


@dataclass(frozen=True)
class Recompute:
    """How to recompute the shortcuts of a module: from those of an earlier one, through the modules in between."""

    start_NCOP: Tensor | None
    modules: tuple[Factors, ...] = ()

    def then(self, module: Factors) -> Recompute:
        """Return the same for the next module."""
        return Recompute(self.start_NCOP, (*self.modules, module))


def join(
    factors: Factors, s_NCOP: Tensor | None, b_TRO: Tensor | None, recompute: Recompute | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x and u of a module.

    Args:
        factors: the rows that folded weights multiply, these weights, the masks, and 1/K.
        s_NCOP: the shortcuts, if they are not among the rows; one for all branches (N1OP) if all have the same.
        b_TRO: the weights of the next module; without one there is no u.
        recompute: how to recompute the shortcuts, so that no wide tensor is kept.
    """
    h_NCVP, a_COV, m_TC, share = factors.h_NCVP, factors.a_COV, factors.m_TC, factors.share
    x_NTOP, u_NTRP = _Join.apply(h_NCVP, a_COV, s_NCOP, m_TC, b_TRO, share, recompute)  # type: ignore[no-untyped-call]
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
        recompute: Recompute | None,
    ) -> tuple[Tensor, Tensor | None]:
        (N, C, _, P), outputs, T = h_NCVP.shape, a_COV.shape[1], len(m_TC)
        x_NTOP = h_NCVP.new_empty(N, T, outputs, P)
        u_NTRP = None if b_TRO is None else h_NCVP.new_empty(N, T, b_TRO.shape[1], P)
        learning = ctx.needs_input_grad[3]
        keeps_f = learning and s_NCOP is None and recompute is None
        few = images_at_a_time(h_NCVP, C * outputs * P)
        f_NCOP = h_NCVP.new_empty(N if keeps_f else few, C, outputs, P)
        for part in parts(N, few):
            f = f_NCOP[part] if keeps_f else f_NCOP[: part.stop - part.start]
            _branches(h_NCVP[part], a_COV, _some(s_NCOP, part), share, out=f)
            _mix(m_TC, f, out=x_NTOP[part])
            x_NTOP[part].clamp_min_(0)
            if b_TRO is not None and u_NTRP is not None:
                times(b_TRO, x_NTOP[part], out=u_NTRP[part])
        ctx.share, ctx.learning, ctx.lean = share, learning, recompute is not None
        ctx.branches_of_s = 0 if s_NCOP is None else s_NCOP.shape[1]
        ctx.set_materialize_grads(False)
        kept = [f_NCOP if keeps_f else None, s_NCOP if learning else None, x_NTOP]
        if recompute is not None:
            kept = [None, recompute.start_NCOP, None]
            ctx.shares = [module.share for module in recompute.modules]
            kept += [t for module in recompute.modules for t in (module.h_NCVP, module.a_COV, module.m_TC)]
        ctx.save_for_backward(h_NCVP, a_COV, m_TC, b_TRO, *kept)
        return x_NTOP, u_NTRP

    @staticmethod
    @first_order
    def backward(ctx: Any, dx_NTOP: Tensor | None, du_NTRP: Tensor | None) -> tuple[Tensor | None, ...]:
        h_NCVP, a_COV, m_TC, b_TRO, f_NCOP, s_NCOP, x_NTOP, *earlier = ctx.saved_tensors
        recompute = None
        if ctx.lean:
            triples = zip(earlier[::3], earlier[1::3], earlier[2::3], ctx.shares, strict=True)
            recompute = Recompute(s_NCOP, tuple(Factors(*triple) for triple in triples))
        (N, C, _, P), outputs, T = h_NCVP.shape, a_COV.shape[1], len(m_TC)
        few = images_at_a_time(h_NCVP, C * outputs * P)
        dh_NCVP = torch.empty_like(h_NCVP)
        ds_NCOP = h_NCVP.new_empty(N, ctx.branches_of_s, outputs, P)
        g_BTOP, f_BCOP = h_NCVP.new_empty(few, T, outputs, P), h_NCVP.new_empty(few, C, outputs, P)
        # Sums over images; small ones are kept per image.
        dm_BTC, da_BCOV = h_NCVP.new_zeros(few, T, C), sums_like(a_COV, f_BCOP)
        db_BTRO = None if du_NTRP is None else sums_like(b_TRO, g_BTOP)
        # df is computed as share * df, the gradient of a shortcut; results that use it are divided by share.
        back_CT, a_CVO = (m_TC * ctx.share).mT, (a_COV / ctx.share).mT
        for part in parts(N, few):
            h, g, f = h_NCVP[part], g_BTOP[: part.stop - part.start], f_BCOP[: part.stop - part.start]
            if f_NCOP is not None:
                f = f_NCOP[part]
            elif recompute is not None or ctx.learning:
                s = _some(s_NCOP, part) if recompute is None else _shortcuts(recompute, part)
                _branches(h, a_COV, s, ctx.share, out=f)
            x = x_NTOP[part] if recompute is None else _mixed(m_TC, f)
            dx = _some(dx_NTOP, part)
            if du_NTRP is not None and db_BTRO is not None:
                times(b_TRO.mT, du_NTRP[part], out=g, plus=dx)
                add_products(db_BTRO, du_NTRP[part], x)
                dx = g
            torch.ops.aten.threshold_backward.grad_input(dx, x, 0, grad_input=g)
            if ctx.learning:
                dm_BTC[: len(f)].baddbmm_(g.flatten(2), f.flatten(2).mT)
            df = ds_NCOP[part] if ctx.branches_of_s == C else f_BCOP[: len(f)]
            _mix(back_CT, g, out=df)
            if 0 < ctx.branches_of_s < C:
                torch.sum(df, 1, keepdim=True, out=ds_NCOP[part])
            add_products(da_BCOV, df, h)
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


def _shortcuts(recompute: Recompute, part: slice) -> Tensor | None:
    """Recompute the shortcuts of a few images."""
    s = _some(recompute.start_NCOP, part)
    for module in recompute.modules:
        h = module.h_NCVP[part]
        f = h.new_empty(*h.shape[:2], module.a_COV.shape[1], h.shape[3])
        _branches(h, module.a_COV, s, module.share, out=f)
        s = _mixed(module.m_TC, f)
    return s


def _mixed(m_TC: Tensor, f: Tensor) -> Tensor:
    """Return x of a few images."""
    x = f.new_empty(len(f), len(m_TC), *f.shape[2:])
    _mix(m_TC, f, out=x)
    return x.clamp_min_(0)


def _some(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def _branches(h: Tensor, a_COV: Tensor, s: Tensor | None, share: float, *, out: Tensor) -> None:
    """Compute f of every branch."""
    if s is not None and s.shape[1] == h.shape[1]:
        times(a_COV, h, out=out, plus=s, share=share)
        return
    times(a_COV, h, out=out)
    if s is not None:
        out.add_(s, alpha=share)


def _mix(m: Tensor, f: Tensor, out: Tensor) -> None:
    """Compute weighted sums of the branches of every image."""
    torch.bmm(for_each(m, len(f)), f.flatten(2), out=out.flatten(2))
