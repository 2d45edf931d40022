"""The outputs of the modules in a forward pass, in the shapes that their readers need (section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Size, Tensor

from maskconnect.core.align import align, aligns_via, can_align
from maskconnect.core.credit import Candidate, Sampler
from maskconnect.core.residual import Pair, combined, describe_output, is_pair
from maskconnect.core.running import RunningSum
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConnectivityError

INPUT = -1
"""The module number of the input of the stack."""

Shapes = list[Size | None]
"""The output shape of every module; None for outputs that are not tensors, and for nested tensors."""


@dataclass
class Outputs:
    """The outputs of the modules that have run so far."""

    by_fan_in: ClassVar[bool] = False  # whether outputs that are not pairs depend on the fan-in of the reader
    layout: Layout
    user_align: Callable[[Tensor, Size], Tensor | None] | None
    only_tensors: bool  # built-in aggregations add, so they need tensors
    known: Shapes | None  # from an earlier pass, for modules that do not run in this one
    pairs: bool = False  # whether modules return a residual and a shortcut
    shared: frozenset[tuple[int, int]] = frozenset()  # (module, fan-in) that several targets read
    first: Any = None  # the input of the stack
    sampler: Sampler = field(default_factory=Sampler)  # for mask gradients
    running: RunningSum = field(default_factory=RunningSum)
    found: list[Any] = field(default_factory=list)  # None for modules that did not run, and for what was dropped
    sizes: Shapes = field(default_factory=list)  # their shapes, also of what was dropped
    joined: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # pairs as one tensor, by module and fan-in
    aligned: dict[Any, list[Tensor]] = field(default_factory=dict)  # each source in other shapes
    fitting: set[tuple[Size, Size]] = field(default_factory=set)  # shapes that can be aligned, found and wanted

    def append(self, y: Any) -> None:
        """Add the output of the next module."""
        if self.pairs and not is_pair(y):
            raise ConnectivityError(
                f"{self.layout.name(len(self.found))} returned {describe_output(y)}; aggregation='residual' needs a "
                "pair of tensors with the same shape, (residual, shortcut). Wrap the module: "
                "mc.Residual(body, shortcut)."
            )
        self.found.append(y)
        self.sizes.append(self._shape(y))

    def apart(self) -> Outputs:
        """Return the same outputs for a reader that leaves no trace: what it joins, aligns and adds is forgotten."""
        aligned = {key: list(shapes) for key, shapes in self.aligned.items()}
        running = replace(self.running, shapes=list(self.running.shapes))
        return replace(self, joined=dict(self.joined), aligned=aligned, running=running)

    def skip(self) -> None:
        """Note that the next module does not run."""
        self.found.append(None)
        self.sizes.append(None)

    def last(self) -> Any:
        """Return the output of the last module."""
        return self.part(len(self.found) - 1, 1)

    def part(self, k: int, fan_in: int) -> Any:
        """Return the output of module k; a pair is joined for a reader with this fan-in."""
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
        """Return the sum of all modules before a target, one sum per part of pairs; None if outputs cannot be added.

        `with_input` adds the input of the stack; it must be the same for all targets.
        """
        running = self.running
        if self.by_fan_in or self.user_align is not None:
            return None
        wanted = range(running.count, target)
        for y in ([self.first] if with_input and not running.parts else []) + [self.found[k] for k in wanted]:
            running.add(tuple(y) if self.pairs else (y,))
        running.count = target
        return running.parts if running.possible else None

    def source(self, k: int, like: int, fan_in: int, target: int | None = None) -> Any:
        """Return the output of module k in the output shape of module `like`.

        Args:
            k: the source, or INPUT.
            like: the module whose output shape is needed.
            fan_in: the fan-in of the reader.
            target: the reader, for errors; None for the output of the stack.
        """
        shape = self.shape_of(like)
        if self.pairs and self.user_align is not None and shape not in (None, self.shape_of(k)):
            residual, shortcut = (self._aligned((k, i), y, k, like, target) for i, y in enumerate(self.found[k]))
            return combined(residual, shortcut, fan_in)
        y = self.part(k, fan_in)
        if not isinstance(y, Tensor):
            if self.only_tensors:
                raise self._no_tensor(k, y)
            return y
        return y if shape is None or y.shape == shape else self._aligned((k, fan_in), y, k, like, target)

    def candidate(self, k: int, like: int, fan_in: int, target: int) -> Candidate:
        """Return the output of module k for a mask gradient, and a key that is equal for equal outputs.

        The arguments are those of `source`. The output is not aligned, unless only the user knows how. It is None if it
        has been sampled before.
        """
        key = (k, fan_in) if self.pairs or self.by_fan_in else k
        if not self._aligns_later(k, like, target):
            return (key, self.shape_of(like)), self.source(k, like, fan_in, target)
        return key, None if key in self.sampler.samples else self.part(k, fan_in)

    def shortcut(self, k: int) -> Candidate:
        """Return the shortcut of module k for a mask gradient, as `candidate` does; running sums can align it."""
        return (k, 0), None if (k, 0) in self.sampler.samples else self.found[k][1]

    def _aligns_later(self, k: int, like: int, target: int) -> bool:
        """Return whether the output of module k can be aligned in the backward pass; an error if it never can."""
        found, shape = self.shape_of(k), self.shape_of(like)
        if found is None or shape is None or self.user_align is not None:
            return False
        if (found, shape) not in self.fitting:
            if not can_align(found, shape):
                raise self._misfit(found, shape, k, like, target)
            self.fitting.add((found, shape))
        return True

    def _aligned(self, key: tuple[int, int], y: Tensor, k: int, like: int, target: int | None) -> Tensor:
        """Return y, the output of module k, in the output shape of module `like`; it is remembered under `key`."""
        shape = self.shape_of(like)
        assert shape is not None
        aligned = self.aligned.setdefault(key if self.pairs or self.by_fan_in else k, [])
        for x in aligned:
            if x.shape == shape:
                return x
        if aligned and self.user_align is None and aligns_via(y.shape, aligned[-1].shape, shape):
            through = align(aligned.pop(), shape)  # the same values with a cheaper backward pass
            assert through is not None
            aligned.append(through)
        else:
            aligned.append(self._align(y, shape, k, like, target))
        return aligned[-1]

    def restarted(self, found: list[Any]) -> Outputs:
        """Return the same pass with these outputs, and nothing derived from them."""
        sampler, sizes = Sampler(self.sampler.images), [self._shape(y) for y in found]
        return replace(self, found=found, sizes=sizes, joined={}, aligned={}, sampler=sampler, running=RunningSum())

    def drop(self, k: int, fan_in: int | None) -> None:
        """Forget the output of module k, or its pair joined for readers with this fan-in."""
        if fan_in is not None:
            self.joined.pop((k, fan_in), None)
            self.aligned.pop((k, fan_in), None)
            return
        self.found[k] = None
        for key in [] if self.pairs else list(self.aligned):  # joined pairs have readers of their own
            if k == (key[0] if isinstance(key, tuple) else key):
                del self.aligned[key]

    def check_not_nested(self, sources: Iterable[int]) -> None:
        """Raise an error if a source is a nested tensor, because those have no inner products."""
        for k in sources:
            y = self.found[k][0] if self.pairs and self.found[k] else self.found[k]
            if isinstance(y, Tensor) and y.is_nested:
                raise ConnectivityError(
                    f"{self.layout.name(k)} returned a nested tensor, from which masks cannot learn. Pad the inputs "
                    "while masks learn; frozen masks may read nested tensors."
                )

    def _no_tensor(self, k: int, y: Any) -> ConnectivityError:
        if k == INPUT:
            return ConnectivityError(
                f"the input of the stack is a {type(y).__name__}; built-in aggregations need a tensor."
            )
        what = f"{self.layout.name(k)} returned a {type(y).__name__}; "
        if isinstance(y, Pair):
            return ConnectivityError(f"{what}use aggregation='residual' for pairs of a residual and a shortcut.")
        return ConnectivityError(f"{what}built-in aggregations need tensors. Pass aggregation=fn(sources, mask).")

    def shape_of(self, module: int) -> Size | None:
        """Return the output shape of a module; None if it is not a tensor."""
        size = self.sizes[module]
        return self.known[module] if size is None and self.known is not None else size

    def _shape(self, y: Any) -> Size | None:
        y = y[0] if self.pairs and y is not None else y
        return y.shape if isinstance(y, Tensor) and not y.is_nested else None

    def _align(self, y: Tensor, shape: Size, k: int, like: int, target: int | None) -> Tensor:
        x: Any = (self.user_align or align)(y, shape)
        if isinstance(x, Tensor) and x.shape == shape:
            return x
        returned = str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
        given = f" that returns the needed shape; yours returned {returned}" if self.user_align else ""
        raise self._misfit(y.shape, shape, k, like, target, given)

    def _misfit(
        self, found: Size, shape: Size, k: int, like: int, target: int | None, given: str = ""
    ) -> ConnectivityError:
        name = self.layout.name
        source = "the input of the stack has" if k == INPUT else f"{name(k)} has output"
        reader = "the output of the stack" if target is None else name(target)
        return ConnectivityError(
            f"{source} shape {tuple(found)} and cannot feed {reader}, which needs {tuple(shape)}, "
            f"the output shape of {name(like)}. Pass align=fn(source, shape){given}."
        )
