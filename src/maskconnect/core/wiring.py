"""Candidate connections and wirings (section 3.2 of the paper).

Modules have flat numbers in the order in which they run. As plain data, which fits into JSON, a wiring lists the
sources of each module:
    a chain   [[], [0], [0, 1]]                    module 2 reads modules 0 and 1
    layered   [[[], []], [[0], [0, 1]]]            branch 1 of layer 1 reads branches 0 and 1 of layer 0
The modules that read the input of the stack (the first one, or the first layer) read nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from maskconnect.errors import ConnectivityError, integer, shown

Sources = tuple[tuple[int, ...], ...]
"""For every module, by its flat number, the flat numbers of the modules that feed it, ascending."""


@dataclass(frozen=True)
class Layout:
    """The number of modules per layer; a chain has one module per layer."""

    sizes: tuple[int, ...]
    layered: bool
    all_out: bool = False  # whether the output reads every module, or only the last layer
    layers: tuple[range, ...] = field(init=False)  # the flat numbers of the modules of each layer
    places: tuple[tuple[int, int], ...] = field(init=False)  # the layer and the branch of each module

    def __post_init__(self) -> None:
        ends = accumulate(self.sizes)
        layers = tuple(range(end - size, end) for end, size in zip(ends, self.sizes, strict=True))
        places = tuple((layer, branch) for layer, size in enumerate(self.sizes) for branch in range(size))
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "places", places)

    @property
    def outputs(self) -> range:
        """The modules that the output reads."""
        return range(sum(self.sizes)) if self.all_out else self.layers[-1]

    @property
    def targets(self) -> range:
        """The modules that read other modules: all except for the first layer."""
        return range(self.sizes[0], sum(self.sizes))

    def name(self, module: int) -> str:
        """Return the name of a module for messages."""
        layer, branch = self.places[module]
        return f"branch {branch} of layer {layer}" if self.layered else f"module {module}"

    def before(self, target: int) -> int:
        """Return the module just before a target; sources of the target are aligned to its output shape."""
        layer, branch = self.places[target]
        above = self.layers[layer - 1]
        return above[branch % len(above)]

    def candidates(self) -> Sources:
        """Return all possible sources of each module: all earlier modules, or layered, all of the layer before."""
        rows: list[tuple[int, ...]] = []
        for layer, members in enumerate(self.layers):
            first = 0 if not self.layered or layer == 0 else self.layers[layer - 1].start
            rows += [tuple(range(first, members.start))] * len(members)
        return tuple(rows)

    def preferred(self, target: int, source: int) -> int:
        """Return the rank of a source for ties in the top-K: nearest first; layered, the same branch, then cyclic."""
        if not self.layered:
            return target - source
        layer, branch = self.places[target]
        above = self.layers[layer - 1]
        return (source - above.start - branch) % len(above)

    def prev(self) -> Sources:
        """Return Fixed-Prev: each module reads the one before; layered, the same branch of the layer before."""
        first = self.targets.start
        return ((),) * first + tuple((self.before(target),) for target in self.targets)

    def to_plain(self, sources: Sources) -> list[Any]:
        """Return a wiring as plain data."""
        if not self.layered:
            return [list(row) for row in sources]
        starts = [0, *(members.start for members in self.layers)]
        return [
            [[k - starts[layer] for k in sources[module]] for module in members]
            for layer, members in enumerate(self.layers)
        ]

    def from_plain(self, plain: object, *, what: str) -> Sources:
        """Read a wiring from plain data; `what` is the name of the argument, for errors."""
        allowed = self.candidates()
        rows = self.rows(plain, what)
        found: list[tuple[int, ...]] = []
        for module, row in enumerate(rows):
            layer, _ = self.places[module]
            offset = self.layers[layer - 1].start if self.layered and layer else 0
            sources = [offset + integer(f"{what}: a source of {self.name(module)}", k) for k in row]
            for k in sources:
                if k not in allowed[module]:
                    raise ConnectivityError(
                        f"{what}: {self.name(module)} lists source {k - offset}; {self._allowed(module)}."
                    )
            if len(set(sources)) < len(sources):
                raise ConnectivityError(f"{what}: {self.name(module)} lists a source twice: {list(row)}.")
            if not sources and module in self.targets:
                raise ConnectivityError(f"{what}: {self.name(module)} has no source; {self._allowed(module)}.")
            found.append(tuple(sorted(sources)))
        return tuple(found)

    def rows(self, plain: object, what: str) -> list[Sequence[object]]:
        """Return plain data as one list of sources per module."""
        if isinstance(plain, dict):
            raise ConnectivityError(
                f"{what} is a dict with the keys {list(plain)}; give the wiring of one stack, a list."
            )
        outer = _sequence(plain, what)
        if len(outer) != len(self.sizes):
            unit = "layers" if self.layered else "modules"
            raise ConnectivityError(f"{what} has {len(outer)} rows; the stack has {len(self.sizes)} {unit}.")
        if not self.layered:
            return [_sequence(row, what) for row in outer]
        rows: list[Sequence[object]] = []
        for layer, (members, size) in enumerate(zip(outer, self.sizes, strict=True)):
            branches = _sequence(members, what)
            if len(branches) != size:
                raise ConnectivityError(f"{what}: layer {layer} has {len(branches)} rows; it has {size} branches.")
            rows += [_sequence(branch, what) for branch in branches]
        return rows

    def _allowed(self, module: int) -> str:
        """Say what a module may read."""
        if module not in self.targets:
            return "it reads the input of the stack and nothing else"
        if not self.layered:
            return f"it may read only the modules before it, 0 to {module - 1}"
        layer, _ = self.places[module]
        return f"it may read only the branches of layer {layer - 1}, 0 to {self.sizes[layer - 1] - 1}"


def random_sources(candidates: Sources, fan_in: Sequence[int], seed: int) -> Sources:
    """Return the wiring Fixed-Random: for each target, K of its candidates, drawn uniformly."""
    chooser = random.Random(seed)
    first = len(candidates) - len(fan_in)
    rows = zip(candidates[first:], fan_in, strict=True)
    return candidates[:first] + tuple(tuple(sorted(chooser.sample(row, k))) for row, k in rows)


def cover(sources: Sources, candidates: Sources, layout: Layout, score: Callable[[int, int], float]) -> Sources:
    """Swap sources until every module is read, if possible; each swap is the one that loses least score.

    Modules are visited from last to first, so a target may give up an earlier module, which is visited later. Modules
    that another target also reads are given up first. If no single swap is possible, a chain of swaps is searched.

    Args:
        sources: the wiring to start from.
        candidates: the candidate sources of each module.
        layout: the layout of the stack.
        score: `score(target, source)`, the value of a connection.
    """
    active = [set(row) for row in sources]
    readers = Counter(k for row in active for k in row)

    def swap(target: int, old: int, new: int) -> None:
        active[target] = active[target] - {old} | {new}
        readers[new] += 1
        readers[old] -= 1

    def place(new: int, tried: set[int]) -> bool:
        """Let a target read `new` and give up a source that another target takes over (an augmenting path)."""
        for target in layout.targets:
            if new not in candidates[target] or target in tried:
                continue
            tried.add(target)
            for old in sorted(active[target], key=lambda k: score(target, k)):
                if readers[old] > 1 or place(old, tried):
                    swap(target, old, new)
                    return True
        return False

    inner = range(layout.layers[-1].start)
    for k in reversed(inner):
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
            swap(target, old, k)
    for k in inner:
        if not readers[k]:
            place(k, set())
    return tuple(tuple(sorted(row)) for row in active)


def random_wiring(layout: Layout, candidates: Sources, fan_in: Sequence[int], seed: int, *, use_all: bool) -> Sources:
    """Return the wiring Fixed-Random; with `use_all`, every module is read."""
    sources = random_sources(candidates, fan_in, seed)
    if not use_all:
        return sources
    worth = random.Random(seed)
    return cover(sources, candidates, layout, lambda target, source: worth.random())


def reaching_output(sources: Sources, outputs: Sequence[int]) -> tuple[bool, ...]:
    """Return which modules reach the output, directly or through other modules (D10)."""
    reaches = [False] * len(sources)
    for module in outputs:
        reaches[module] = True
    for target in reversed(range(len(sources))):  # every source stands before its targets
        if reaches[target]:
            for source in sources[target]:
                reaches[source] = True
    return tuple(reaches)


def _sequence(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConnectivityError(f"{what} holds {shown(value)}; a wiring has a list of sources per module.")
    return value
