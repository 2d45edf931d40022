"""The gradient by the mask of a target, from what it sees of its candidates (Algorithm 1, step 2).

    dl/dm_jk = (1/K_j) <dl/dx_j, y_k>

The inner product is a sum over the images of a batch. With `images=b` it is taken over about b images that are evenly
spaced, and scaled up to all of them; then only these images of each source are kept for the backward pass.

Shape letters: S candidate sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from maskconnect.core.align import layout_of
from maskconnect.core.rows import Rows, fits, row_of


@dataclass(frozen=True, eq=False)
class Listed:
    """Candidates one by one."""

    tensors: tuple[Tensor, ...]

    @property
    def layout(self) -> torch.memory_format:
        """In which order their numbers lie in memory."""
        return layout_of(self.tensors[0])

    def products(self, a: Tensor) -> Tensor:
        """<a, y_k> of each."""
        return torch.stack(inner_products(a, self.tensors))

    def join(self, weight_S: Tensor) -> Tensor:
        """Their sum, each times a weight."""
        x: Tensor = reduce(torch.add, [w.to(y.dtype) * y for w, y in zip(weight_S, self.tensors, strict=True)])
        return x


@dataclass(frozen=True, eq=False)
class InRows:
    """Candidates that are the first rows of a matrix."""

    rows: Rows
    count: int

    @property
    def layout(self) -> torch.memory_format:
        """In which order their numbers lie in memory."""
        return self.rows.layout

    def products(self, a: Tensor) -> Tensor:
        """<a, y_k> of each."""
        return self.rows.products(a, self.count)

    def join(self, weight_S: Tensor) -> Tensor:
        """Their sum, each times a weight."""
        return self.rows.join(weight_S.to(self.rows.blocks[0].dtype))


@dataclass(frozen=True, eq=False)
class Seen:
    """What a mask sees of its candidates: candidate k is the sum over all terms of factor * candidates[k].

    Residual blocks have two terms where what a reader gets of their shortcuts depends on its fan-in.
    """

    terms: tuple[tuple[float, Listed | InRows], ...]
    stride: int = 1  # every stride-th image is there

    def tensors(self) -> list[Tensor]:
        """Those that autograd is to keep; rows are copies, which nobody changes."""
        return [y for _, candidates in self.terms if isinstance(candidates, Listed) for y in candidates.tensors]

    def holding(self, tensors: Sequence[Tensor]) -> Seen:
        """The same with these tensors, which are those that autograd kept, or with none."""
        listed = sum(isinstance(candidates, Listed) for _, candidates in self.terms)
        size, left = len(tensors) // max(1, listed), list(tensors)
        terms: list[tuple[float, Listed | InRows]] = []
        for factor, candidates in self.terms:
            if isinstance(candidates, Listed):
                candidates, left = Listed(tuple(left[:size])), left[size:]
            terms.append((factor, candidates))
        return Seen(tuple(terms), self.stride)

    def gradient(self, grad_x: Tensor, mask_S: Tensor, divisor: float, credit: str) -> Tensor:
        """dl/dm; `grad_x` is dl/dx of all images, divided by the divisor of the join."""
        more = 1.0
        if self.stride > 1:
            more = len(grad_x) / -(-len(grad_x) // self.stride)
            grad_x = grad_x[:: self.stride]
        if grad_x.dim() == 4:
            grad_x = grad_x.contiguous(memory_format=self.terms[0][1].layout)  # else every product would copy it
        grad_S = self._products(grad_x)
        if credit == "new":
            x: Tensor = reduce(torch.add, [f * candidates.join(mask_S / divisor) for f, candidates in self.terms])
            along, length = inner_products(x, [grad_x, x])
            grad_S = grad_S - (along / length.clamp_min(torch.finfo(length.dtype).tiny)) * self._products(x)
        return grad_S.to(mask_S.dtype) * more

    def _products(self, a: Tensor) -> Tensor:
        found: Tensor = reduce(torch.add, [factor * candidates.products(a) for factor, candidates in self.terms])
        return found


@dataclass(eq=False)
class Sampler:
    """Makes what masks see in one forward pass: of every source a sample, once.

    Args:
        images: about how many of a batch are seen; None for all.
    """

    images: int | None = None
    made: dict[Any, tuple[list[Tensor], Rows | list[Tensor]]] = field(
        default_factory=dict
    )  # sources, and their samples

    def stride(self, y: Tensor) -> int:
        """Every stride-th image is seen."""
        if self.images is None or y.is_nested or not y.dim():
            return 1
        return max(1, -(-y.shape[0] // self.images))

    def seen(self, *terms: tuple[float, Sequence[Tensor]]) -> Seen:
        """What a mask sees of candidates with these terms."""
        stride = self.stride(terms[0][1][0])
        found = [(factor, self._candidates(sources, stride, number)) for number, (factor, sources) in enumerate(terms)]
        return Seen(tuple(found), stride)

    def _candidates(self, sources: Sequence[Tensor], stride: int, number: int) -> Listed | InRows:
        if stride == 1:
            return Listed(tuple(y.detach() for y in sources))
        like = sampled(sources[0], stride)
        in_rows = all(map(fits, sources))
        key = number, like.shape, like.dtype if in_rows else None
        known, samples = self.made.setdefault(key, ([], Rows.like(like) if in_rows else []))
        if not all(a is b for a, b in zip(known, sources, strict=False)):  # targets of a chain read all before them
            return Listed(tuple(sampled(y, stride).clone() for y in sources))
        for y in sources[len(known) :]:
            samples.append(sampled(y, stride).clone() if isinstance(samples, list) else sampled(y, stride))
            known.append(y)
        if isinstance(samples, Rows):
            return InRows(samples, len(sources))
        return Listed(tuple(samples[: len(sources)]))


def sampled(y: Tensor, stride: int) -> Tensor:
    """Every stride-th image, without a graph."""
    return y.detach()[::stride] if stride > 1 else y.detach()


def inner_products(a: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """<a, b> for each of the others."""
    layout = layout_of(a)
    a_P, others_P = row_of(a, layout), [row_of(b, layout) for b in others]
    if a.dtype in (torch.float32, torch.float64) and all(b.dtype == a.dtype for b in others):
        return [torch.dot(a_P, b_P) for b_P in others_P]
    return [_inner(a_P, b_P) for b_P in others_P]


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of vectors, added up in float32 at least; of complex tensors the real part, as a mask is real."""
    dtype = reduce(torch.promote_types, (a.dtype, b.dtype), torch.float32)
    product = torch.vdot(a.to(dtype), b.to(dtype))
    return product.real if product.is_complex() else product
