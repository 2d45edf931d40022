"""What the modules of a stack have returned in a forward pass, in the shapes that their readers need (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Size, Tensor

from maskconnect.core.align import align, leads_through
from maskconnect.core.credit import Sampler
from maskconnect.core.residual import Pair, combined, in_words, is_pair
from maskconnect.core.running import RunningSum
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConnectivityError

INPUT = -1
"""The number that stands for the input of the stack."""

Shapes = list[Size | None]
"""The output shape of every module; None of what is not a tensor, and of nested tensors."""


@dataclass
class Outputs:
    """The outputs of the modules that have run so far."""

    by_fan_in: ClassVar[bool] = False  # whether what a reader gets depends on its fan-in, of other outputs than pairs
    layout: Layout
    user_align: Callable[[Tensor, Size], Tensor | None] | None
    only_tensors: bool  # the built-in aggregations add, so they need tensors
    known: Shapes | None  # from an earlier pass, for modules that this one does not run
    pairs: bool = False  # whether modules return a residual and a shortcut
    shared: frozenset[tuple[int, int]] = frozenset()  # modules that several readers of one fan-in read, and that fan-in
    first: Any = None  # the input of the stack
    sampler: Sampler = field(default_factory=Sampler)  # of what masks see
    running: RunningSum = field(default_factory=RunningSum)
    found: list[Any] = field(default_factory=list)
    joined: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # pairs as one tensor, by module and fan-in
    aligned: dict[Any, list[Tensor]] = field(default_factory=dict)  # each source in the other shapes asked for so far

    def append(self, y: Any) -> None:
        """The next module returned y."""
        if self.pairs and not is_pair(y):
            raise ConnectivityError(
                f"{self.layout.name(len(self.found))} returned {in_words(y)}; aggregation='residual' needs a pair of "
                "tensors of one shape, (residual, shortcut). Wrap the module: mc.Residual(body, shortcut)."
            )
        self.found.append(y)

    def skip(self) -> None:
        """The next module need not run."""
        self.found.append(None)

    def last(self) -> Any:
        """What the last module returned."""
        return self.part(len(self.found) - 1, 1)

    def shapes(self) -> Shapes:
        """Of all outputs, once every module has run."""
        return [self._shape(y) for y in self.found]

    def part(self, k: int, fan_in: int) -> Any:
        """The output of module k, of a pair as a reader of this fan-in gets it."""
        if k == INPUT:
            return self.first
        if not self.pairs:
            return self.found[k]
        if (k, fan_in) in self.joined:
            return self.joined[k, fan_in]
        residual, shortcut = self.found[k]
        made = combined(residual, shortcut, fan_in)
        if (k, fan_in) in self.shared:
            self.joined[k, fan_in] = made
        return made

    def all_before(self, target: int, *, with_input: bool = False) -> list[Tensor] | None:
        """The sum of all modules before a target, of pairs part by part; None where outputs cannot be added so.

        `with_input` adds the input of the stack; either all targets ask for it or none does.
        """
        running = self.running
        if self.by_fan_in or self.user_align is not None:
            return None
        wanted = range(running.count, target)
        for y in ([self.first] if with_input and not running.parts else []) + [self.found[k] for k in wanted]:
            running.add(tuple(y) if self.pairs else (y,))
        running.count = target
        return running.parts if running.possible else None

    def shortcut(self, k: int, like: int, target: int) -> Tensor:
        """What module k passes on beside its residual, in the shape of module `like`'s."""
        y: Tensor = self.found[k][1]
        return y if y.shape == self._shape_of(like) else self._aligned((k, 0), y, k, like, target)

    def source(self, k: int, like: int, fan_in: int, target: int | None = None) -> Any:
        """The output of module k in the shape of module `like`'s, for `target` (None: the output of the stack).

        `fan_in` is that of the reader. k may be INPUT.
        """
        shape = self._shape_of(like)
        if self.pairs and self.user_align is not None and shape not in (None, self._shape_of(k)):
            residual, shortcut = (self._aligned((k, i), y, k, like, target) for i, y in enumerate(self.found[k]))
            return combined(residual, shortcut, fan_in)
        y = self.part(k, fan_in)
        if not isinstance(y, Tensor):
            if self.only_tensors:
                raise self._no_tensor(k, y)
            return y
        return y if shape is None or y.shape == shape else self._aligned((k, fan_in), y, k, like, target)

    def _aligned(self, key: tuple[int, int], y: Tensor, k: int, like: int, target: int | None) -> Tensor:
        """y, which module k returned, in the shape of module `like`'s; `key` is where it is remembered."""
        shape = self._shape_of(like)
        assert shape is not None
        aligned = self.aligned.setdefault(key if self.pairs or self.by_fan_in else k, [])
        for x in aligned:
            if x.shape == shape:
                return x
        if aligned and self.user_align is None and leads_through(y.shape, aligned[-1].shape, shape):
            through = align(aligned[-1], shape)  # the same numbers, and backward fewer of them
            assert through is not None
            aligned.append(through)
        else:
            aligned.append(self._align(y, shape, k, like, target))
        return aligned[-1]

    def restarted(self, found: list[Any]) -> Outputs:
        """The same pass with these outputs, and nothing made of them."""
        sampler = Sampler(self.sampler.images)
        return replace(self, found=found, joined={}, aligned={}, sampler=sampler, running=RunningSum())

    def drop_aligned(self, k: int) -> None:
        """Forget what was made of module k for its readers."""
        for key in list(self.aligned):
            if k == (key[0] if isinstance(key, tuple) else key):
                del self.aligned[key]

    def _no_tensor(self, k: int, y: Any) -> ConnectivityError:
        if k == INPUT:
            return ConnectivityError(
                f"the input of the stack is a {type(y).__name__}; this aggregation needs a tensor."
            )
        what = f"{self.layout.name(k)} returned a {type(y).__name__}; "
        if isinstance(y, Pair):
            return ConnectivityError(f"{what}use aggregation='residual' for pairs of a residual and a shortcut.")
        return ConnectivityError(f"{what}built-in aggregations need tensors. Pass aggregation=fn(sources, mask).")

    def _shape_of(self, module: int) -> Size | None:
        if self.found[module] is None and self.known is not None:
            return self.known[module]
        return self._shape(self.found[module])

    def _shape(self, y: Any) -> Size | None:
        y = y[0] if self.pairs and y is not None else y
        return y.shape if isinstance(y, Tensor) and not y.is_nested else None

    def _align(self, y: Tensor, shape: Size, k: int, like: int, target: int | None) -> Tensor:
        name = self.layout.name
        found = "the input of the stack has" if k == INPUT else f"{name(k)} has output"
        x: Any = (self.user_align or align)(y, shape)
        if isinstance(x, Tensor) and x.shape == shape:
            return x
        reader = "the output of the stack" if target is None else name(target)
        returned = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        given = f" (the one given returned {returned})" if self.user_align else ""
        raise ConnectivityError(
            f"{found} shape {tuple(y.shape)} and cannot feed {reader}, which needs {tuple(shape)}, "
            f"the output shape of {name(like)}. Pass align=fn(source, shape){given}."
        )
