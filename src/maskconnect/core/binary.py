"""Binary masks as a matrix, and the wiring that they stand for (section 3.3).

Shape letters: T targets, S candidate sources. Row t belongs to the t-th target, its columns to the candidates of that
target in ascending order. Rows are padded to the longest; paddings are always zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskconnect.core.wiring import Layout, Sources, reaching_output


@dataclass(frozen=True, eq=False)
class BinaryMasks:
    """The masks of one forward pass, as a tensor on the host and as the wiring that they stand for.

    Blended masks (`mc.Blend`) hold shares between 0 and 1: more than K sources are active, each with a weight.
    """

    mask_TS: Tensor
    sources: Sources  # the active sources of every module
    fan_in: tuple[int, ...]  # K of every module, the sum of its mask
    alive: tuple[bool, ...]  # which modules can reach the output
    readers: tuple[int, ...]  # how many targets read each module
    top_TS: Tensor | None = None  # for blended masks, the top-K that they approach


def read_masks(
    mask_TS: Tensor,
    layout: Layout,
    candidates: Sources,
    fan_in: Sequence[int] | None = None,
    top_TS: Tensor | None = None,
) -> BinaryMasks:
    """Return the wiring of a mask matrix; `fan_in` (one number per target) and `top_TS` are for blended masks only."""
    active: list[tuple[int, ...]] = [()] * layout.targets.start
    for target, row in zip(layout.targets, mask_TS.tolist(), strict=True):
        active.append(tuple(k for k, on in zip(candidates[target], row, strict=False) if on))
    sources = tuple(active)
    count = Counter(k for row in sources for k in row)
    alive = reaching_output(sources, layout.outputs)
    readers = tuple(count[k] for k in range(len(sources)))
    counts = tuple(map(len, sources)) if fan_in is None else (*[0] * layout.targets.start, *fan_in)
    return BinaryMasks(mask_TS, sources, counts, alive, readers, top_TS)


def write_mask(sources: Sources, layout: Layout, candidates: Sources) -> Tensor:
    """Return the matrix of binary masks that stands for `sources`."""
    chosen = [set(row) for row in sources]
    return padded([[k in chosen[j] for k in candidates[j]] for j in layout.targets], 0).bool()


def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Return rows of different lengths as one matrix, on the host even if the default device is another."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device="cpu").reshape(len(rows), width)
