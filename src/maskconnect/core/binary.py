"""Binary masks, and the wiring that they mean (section 3.2).

Shape letters: T targets, S candidate sources. Row t belongs to the t-th target, its columns to that target's
candidates in ascending order; rows are padded to the longest.
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
    """The binary masks of one forward pass, as a tensor on the host and as the wiring that they mean.

    Blended masks (`ConnectivityMasks.blend`) are shares between 0 and 1: more than K sources are active, each in part.
    """

    mask_TS: Tensor
    sources: Sources  # the active ones of every module
    fan_in: tuple[int, ...]  # K of every module: what its mask adds up to
    alive: tuple[bool, ...]  # which modules can reach the output
    readers: tuple[int, ...]  # how many targets read each module


def read_masks(
    mask_TS: Tensor, layout: Layout, candidates: Sources, fan_in: Sequence[int] | None = None
) -> BinaryMasks:
    """What a matrix of binary masks means; `fan_in`, one number a target, is asked for where it is blended."""
    active: list[tuple[int, ...]] = [()] * layout.targets.start
    for target, row in zip(layout.targets, mask_TS.tolist(), strict=True):
        active.append(tuple(k for k, on in zip(candidates[target], row, strict=False) if on))
    sources = tuple(active)
    count = Counter(k for row in sources for k in row)
    alive = reaching_output(sources, layout.outputs)
    readers = tuple(count[k] for k in range(len(sources)))
    counts = tuple(map(len, sources)) if fan_in is None else (*[0] * layout.targets.start, *fan_in)
    return BinaryMasks(mask_TS, sources, counts, alive, readers)


def write_mask(sources: Sources, layout: Layout, candidates: Sources) -> Tensor:
    """The matrix of binary masks that means `sources`."""
    chosen = [set(row) for row in sources]
    return padded([[k in chosen[j] for k in candidates[j]] for j in layout.targets], 0).bool()


def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Rows of different length as one matrix, on the host whatever the default device is."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device="cpu").reshape(len(rows), width)
