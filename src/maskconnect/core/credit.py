"""The gradient by the mask of a target, from all images of a batch or from a sample (Algorithm 1, step 2).

    dl/dm_jk = (1/K_j) <dl/dx_j, y_k>

The inner product is a sum over the images of a batch. With `images=b` it uses about b evenly spaced images and is
scaled up to the batch. Then only these images of each source are kept for the backward pass. Sources of another shape
are kept as they are and aligned in the backward pass.

Shape letters: S candidate sources.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Size, Tensor

from maskconnect.core.align import align, layout_of
from maskconnect.core.rows import Rows, fits, row_of


@dataclass(eq=False)
class Aligned:
    """Sources in the shape of the target whose mask gradient is computed. The next target often has the same shape.

    It is used in a backward pass only, and is empty after it.
    """

    latest: tuple[Size | None, dict[Hashable, Tensor]] = field(default_factory=lambda: (None, {}))

    def get(self, key: Hashable, y: Tensor, shape: Size) -> Tensor:
        """Return y, the source with this key, in this shape."""
        if y.shape == shape:
            return y
        known, made = self.latest
        if known != shape:
            self.latest = shape, made = shape, {}
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)  # at the end of this backward pass
        if key not in made:
            x = align(y, shape)
            assert x is not None
            made[key] = x.contiguous(memory_format=layout_of(y))
        return made[key]

    def forget(self) -> None:
        """Free what was aligned."""
        self.latest = None, {}


@dataclass(frozen=True, eq=False)
class Listed:
    """Candidates as separate tensors."""

    keys: tuple[Hashable, ...]
    tensors: tuple[Tensor, ...]
    aligned: Aligned

    @property
    def layout(self) -> torch.memory_format:
        """The memory format of the candidates."""
        return layout_of(self.tensors[-1])

    def products(self, a: Tensor) -> Tensor:
        """Return <a, y_k> for each candidate."""
        return torch.stack(inner_products(a, self._like(a)))

    def join(self, weight_S: Tensor, like: Tensor) -> Tensor:
        """Return the sum of the candidates, each times a weight, in the shape of `like`."""
        terms = zip(weight_S, self._like(like), strict=True)
        x: Tensor = reduce(torch.add, [w.to(y.dtype) * y for w, y in terms])
        return x

    def _like(self, a: Tensor) -> list[Tensor]:
        return [self.aligned.get(key, y, a.shape) for key, y in zip(self.keys, self.tensors, strict=True)]


@dataclass(frozen=True, eq=False)
class InRows:
    """Candidates as the first rows of a matrix."""

    rows: Rows
    count: int

    @property
    def layout(self) -> torch.memory_format:
        """The memory format of the candidates."""
        return self.rows.layout

    def products(self, a: Tensor) -> Tensor:
        """Return <a, y_k> for each candidate."""
        return self.rows.products(a, self.count)

    def join(self, weight_S: Tensor, like: Tensor) -> Tensor:
        """Return the sum of the candidates, each times a weight; it has the shape of `like`."""
        return self.rows.join(weight_S.to(self.rows.blocks[0].dtype))


@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a mask gradient: candidate k is the sum over all terms of factor * candidates[k].

    Residual blocks have two terms if the weight of their shortcuts depends on the fan-in of the reader.
    """

    terms: tuple[tuple[float, Listed | InRows], ...]
    stride: int = 1  # every stride-th image is kept

    def tensors(self) -> list[Tensor]:
        """Return the tensors that autograd must save; samples are copies, which nothing changes."""
        listed = [candidates for _, candidates in self.terms if isinstance(candidates, Listed)]
        return [y for candidates in listed for y in candidates.tensors] if self.stride == 1 else []

    def holding(self, tensors: Sequence[Tensor]) -> Seen:
        """Return the same with these tensors, the ones that autograd saved, or with none."""
        if self.stride > 1:
            return self
        size = len(tensors) // len(self.terms)
        terms: list[tuple[float, Listed | InRows]] = []
        for i, (factor, candidates) in enumerate(self.terms):
            assert isinstance(candidates, Listed)
            terms.append((factor, replace(candidates, tensors=tuple(tensors[i * size : (i + 1) * size]))))
        return Seen(tuple(terms))

    def gradient(self, grad_x: Tensor, mask_S: Tensor, divisor: float, credit: str) -> Tensor:
        """Return dl/dm; `grad_x` is dl/dx of all images, divided by the divisor of the join."""
        more = 1.0
        if self.stride > 1:
            more = len(grad_x) / -(-len(grad_x) // self.stride)
            grad_x = grad_x[:: self.stride]
        if grad_x.dim() == 4:
            grad_x = grad_x.contiguous(memory_format=self.terms[0][1].layout)  # otherwise every product would copy it
        grad_S = self._products(grad_x)
        if credit == "new":
            x: Tensor = reduce(
                torch.add, [f * candidates.join(mask_S / divisor, grad_x) for f, candidates in self.terms]
            )
            along, length = inner_products(x, [grad_x, x])
            grad_S = grad_S - (along / length.clamp_min(torch.finfo(length.dtype).tiny)) * self._products(x)
        return _times(more, grad_S.to(mask_S.dtype))

    def _products(self, a: Tensor) -> Tensor:
        found: Tensor = reduce(torch.add, [_times(factor, candidates.products(a)) for factor, candidates in self.terms])
        return found


Candidate = tuple[Hashable, Tensor | None]
"""A candidate with a key that is equal for equal sources; None if the key has been sampled before."""


@dataclass(eq=False)
class Sampler:
    """Samples every source of one forward pass once, for the mask gradients.

    Args:
        images: about how many images of a batch to sample; None for all.
    """

    images: int | None = None
    samples: dict[Hashable, tuple[int, Tensor]] = field(default_factory=dict)  # with the stride between images
    rows: dict[Hashable, tuple[list[Hashable], Rows]] = field(default_factory=dict)  # samples, with their keys
    aligned: Aligned | None = None  # in the backward pass; made when needed, because the compiler follows no default

    def stride(self, y: Tensor) -> int:
        """Return the stride between the images that are sampled."""
        if self.images is None or not y.dim():
            return 1
        return max(1, -(-y.shape[0] // self.images))

    def seen(self, *terms: tuple[float, Sequence[Candidate]], shape: Size | None = None) -> Seen:
        """Return what a mask gradient uses of its candidates.

        Args:
            terms: a factor and the candidates of each term.
            shape: the shape of the input of the target; None if it is that of all candidates.
        """
        found, stride = [], 1
        self.aligned = self.aligned or Aligned()
        for number, (factor, candidates) in enumerate(terms):
            keys = tuple(key for key, _ in candidates)
            samples = [self._sample(key, y) for key, y in candidates]
            stride, first = samples[0]
            tensors = tuple(y for _, y in samples)
            listed: Listed | InRows = Listed(keys, tensors, self.aligned)
            if stride > 1 and all(map(fits, tensors)) and len({y.dtype for y in tensors}) == 1:
                wanted = first.shape if shape is None else Size((len(first), *shape[1:]))
                listed = self._in_rows(number, keys, tensors, wanted) or listed
            found.append((factor, listed))
        return Seen(tuple(found), stride)

    def _sample(self, key: Hashable, y: Tensor | None) -> tuple[int, Tensor]:
        """Return the stride and the sample of a source; it is a copy unless all images are used."""
        if key in self.samples:
            return self.samples[key]
        assert y is not None
        stride = self.stride(y)
        found = stride, sampled(y, stride).clone() if stride > 1 else y.detach()
        if self.images is not None:
            self.samples[key] = found
        return found

    def _in_rows(
        self, number: int, keys: tuple[Hashable, ...], samples: Sequence[Tensor], shape: Size
    ) -> InRows | None:
        """Return samples as rows of matrices; None if the targets of this shape do not read the same first sources."""
        slot = number, shape, samples[0].dtype
        if slot not in self.rows:
            self.rows[slot] = [], Rows(shape, layout_of(samples[-1]))
        known, rows = self.rows[slot]
        if not all(a == b for a, b in zip(known, keys, strict=False)):
            return None
        for key, y in zip(keys[len(known) :], samples[len(known) :], strict=True):
            x = align(y, shape)
            assert x is not None
            row = rows.append(x)
            if y.shape == shape:
                self.samples[key] = self.samples[key][0], row  # the same values, once in memory
            known.append(key)
        return InRows(rows, len(keys))


def _times(factor: float, x: Tensor) -> Tensor:
    return x if factor == 1 else factor * x


def sampled(y: Tensor, stride: int) -> Tensor:
    """Return every stride-th image, without a graph."""
    return y.detach()[::stride] if stride > 1 else y.detach()


def inner_products(a: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """Return <a, b> for each of the others."""
    layout = layout_of(a)
    a_P, others_P = row_of(a, layout), [row_of(b, layout) for b in others]
    if a.dtype in (torch.float32, torch.float64) and all(b.dtype == a.dtype for b in others):
        return [torch.dot(a_P, b_P) for b_P in others_P]
    a_P = a_P.to(torch.promote_types(a.dtype, torch.float32))  # once, not in every product
    return [_inner(a_P, b_P) for b_P in others_P]


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return <a, b> of vectors, added in float32 at least; the real part for complex tensors, as masks are real."""
    dtype = reduce(torch.promote_types, (a.dtype, b.dtype), torch.float32)
    product = torch.vdot(a.to(dtype), b.to(dtype))
    return product.real if product.is_complex() else product
