"""Wirings in which every module is read (`use_all`): what K sources a target leave unread would be lost to pruning."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from maskconnect.core.wiring import Layout, Sources, random_sources


def cover(sources: Sources, candidates: Sources, layout: Layout, score: Callable[[int, int], float]) -> Sources:
    """Swap sources until every module is read that may be; of all swaps for a module, the one that costs least score.

    Modules are looked at from the last to the first, so a target may give up an earlier one, whose turn is still to
    come; rather, though, one that another target reads too. `score(target, source)` says what a connection is worth.
    """
    active = [set(row) for row in sources]
    readers = Counter(k for row in active for k in row)
    for k in reversed(range(layout.layers[-1].start)):
        if readers[k]:
            continue
        swaps = [
            (readers[old] > 1, score(target, k) - score(target, old), target, old)
            for target in layout.targets
            if k in candidates[target]
            for old in active[target]
            if old < k or readers[old] > 1
        ]
        if swaps:
            *_, target, old = max(swaps)
            active[target] = active[target] - {old} | {k}
            readers[k] += 1
            readers[old] -= 1
    return tuple(tuple(sorted(row)) for row in active)


def random_wiring(layout: Layout, candidates: Sources, fan_in: Sequence[int], seed: int, *, use_all: bool) -> Sources:
    """Fixed-Random, in which every module is read if `use_all` asks for that."""
    sources = random_sources(candidates, fan_in, seed)
    if not use_all:
        return sources
    worth = random.Random(seed)
    return cover(sources, candidates, layout, lambda target, source: worth.random())
