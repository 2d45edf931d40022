"""The inputs of blended targets of a chain by matrix products: the fast path of `mc.Blend` (Eq. 1).

While masks are blended, every target reads all modules before it. With outputs as the rows of a matrix Y and masks as a
matrix M, the input of target j is row j of M times Y, and the gradient of output k is column k of M^T times G:

    x_j = M[j] Y      dl/dy_k = M^T[k] G      G[j] = dl/dx_j

So one operation reads all sources of a target, and one all gradients of a source. Autograd knows the order only: every
output is `put` into Y, which gives a token; targets take the tokens of what they read, and send no gradient back along
them, but leave it in G. When autograd comes to the `put` of an output, all its readers have left theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskconnect.core.credit import Seen
from maskconnect.core.reference import refusing
from maskconnect.core.replay import backward_pass
from maskconnect.core.rows import Rows, fits


@dataclass(eq=False)
class Gradients:
    """What the targets of one backward pass have left for their sources: G, and the rows of M that belong to it."""

    left: Rows
    weights: list[Tensor] = field(default_factory=list)
    depends_on: list[Tensor] = field(default_factory=list)  # where gradients have a graph themselves
    number: int | None = None  # of the backward pass

    def leave(self, grad_x: Tensor, weight_S: Tensor) -> None:
        """A target has this gradient, and read its sources with these weights."""
        if self.number != backward_pass():  # the same graph may be gone through again
            self.left = Rows(self.left.shape, self.left.layout)
            self.weights, self.depends_on, self.number = [], [], backward_pass()
        self.left.append(grad_x.detach())
        self.weights.append(weight_S)
        if torch.is_grad_enabled():
            self.depends_on.append(grad_x)

    def of(self, number: int) -> Tensor | None:
        """The gradient of the source of this number."""
        if self.number != backward_pass():
            return None
        with torch.no_grad():
            weight_R = torch.stack([weight_S[number] for weight_S in self.weights])
            grad = self.left.join(weight_R)
        return refusing([grad], self.depends_on)[0]


@dataclass(eq=False)
class Exchange:
    """The outputs of one shape in a forward pass that blended targets read."""

    known: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    rows: Rows | None = None
    gradients: Gradients | None = None

    def put(self, sources: Sequence[Tensor]) -> bool:
        """Take up the outputs that are new; False where these are not the known ones and more."""
        if len(sources) < len(self.known) or not all(a is b for a, b in zip(self.known, sources, strict=False)):
            return False
        if self.rows is None:
            self.rows = Rows.like(sources[0])
            self.gradients = Gradients(Rows.like(sources[0]))
        for y in sources[len(self.known) :]:
            self.tokens.append(_Put.apply(self.rows, self.gradients, y))  # type: ignore[no-untyped-call]
            self.known.append(y)
        return True


def can_exchange(sources: Sequence[Any]) -> bool:
    """Whether outputs can be rows of one matrix."""
    first = sources[0]
    return all(
        isinstance(y, Tensor) and fits(y) and y.dtype == first.dtype and y.shape == first.shape for y in sources
    ) and (len({y.device for y in sources}) == 1)


def blended_total(mask_S: Tensor, exchange: Exchange, divisor: float, seen: Seen, credit: str, always: int) -> Tensor:
    """The sum of all sources that were put into the exchange, each times its entry of the mask, divided.

    The first `always` sources count as a whole, and have no entry.
    """
    x: Tensor = _Blended.apply(  # type: ignore[no-untyped-call]
        mask_S, exchange.rows, exchange.gradients, divisor, seen, credit, always, *exchange.tokens
    )
    return x


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, gradients: Gradients, y: Tensor) -> Tensor:
        ctx.gradients, ctx.number = gradients, rows.count
        ctx.set_materialize_grads(False)
        rows.append(y)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, none: None) -> tuple[None, None, Tensor | None]:
        return None, None, ctx.gradients.of(ctx.number)


class _Blended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask_S: Tensor,
        rows: Rows,
        gradients: Gradients,
        divisor: float,
        seen: Seen,
        credit: str,
        always: int,
        *tokens: Tensor,
    ) -> Tensor:
        weight_S = mask_S if divisor == 1 else mask_S / divisor
        if always:
            weight_S = torch.cat([weight_S.new_full((always,), 1 / divisor), weight_S])
        ctx.divisor, ctx.seen, ctx.credit, ctx.gradients = divisor, seen.holding([]), credit, gradients
        ctx.tokens = len(tokens)
        ctx.save_for_backward(mask_S, weight_S, *(seen.tensors() if ctx.needs_input_grad[0] else ()))
        return rows.join(weight_S.to(rows.blocks[0].dtype))

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        mask_S, weight_S, *seen = ctx.saved_tensors
        grad_S = None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                grad_S = ctx.seen.holding(seen).gradient(grad_x, mask_S, ctx.divisor, ctx.credit) / ctx.divisor
        if any(ctx.needs_input_grad[7:]):
            ctx.gradients.leave(grad_x, weight_S.to(grad_x.dtype))
        if grad_S is not None:
            (grad_S,) = refusing([grad_S], [grad_x] if torch.is_grad_enabled() else [])
        return grad_S, *[None] * (6 + ctx.tokens)
