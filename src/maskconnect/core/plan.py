"""What a frozen stack does, written down step by step, so that no mask is needed any more (D10).

An example shows how sources are brought into the shapes that their readers need: by what strides they are subsampled
and how many channels of zeros they get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor, nn

from maskconnect.core.align import align
from maskconnect.core.count import stacks_of
from maskconnect.core.layerwise import LayerAggregation
from maskconnect.core.outputs import Shapes
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConnectivityError

Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Subsample:
    """What `align` did to a source in the example, in numbers."""

    strides: tuple[int, ...]  # of the axes after the channels
    zeros: int  # further channels
    unseen: Axes  # axes whose strides the example did not show, and their lengths in it


@dataclass(frozen=True)
class Wanted:
    """The shape that the user's own `align` is asked for: that of a module that stays, else the source's, scaled."""

    like: int | None
    rank: int  # how many axes the source has
    scale: Axes  # n becomes n * up / down, rounded up; an axis that the source has not becomes `up`
    unseen: Axes


@dataclass(frozen=True)
class Step:
    """Run a module, align the output of one, or make the output of layers; the result is found under `number`."""

    number: int  # a module's own; of what is aligned, and of the output, a further one
    reads: tuple[int, ...]  # nothing: the input of the stack
    how: Subsample | Wanted | None = None  # where it aligns


@dataclass(frozen=True)
class Plan:
    """A stack as steps; of layers whose inputs are made together the wiring says all, and there are none."""

    steps: tuple[Step, ...] = ()
    arguments: tuple[str | int, ...] = ()  # what the stack gets beside its input: names of keywords, or places
    half: bool = False  # whether outputs are in float16, in which a sum may overflow
    tensors: bool = True  # whether all outputs are tensors

    def describe(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Plan:
        """The plan that `describe` described."""
        steps = [Step(s["number"], tuple(s["reads"]), _how(s["how"])) for s in found["steps"]]
        return cls(tuple(steps), tuple(found["arguments"]), found["half"], found["tensors"])


def _how(found: Mapping[str, Any] | None) -> Subsample | Wanted | None:
    if found is None:
        return None
    unseen = tuple((axis, length) for axis, length in found["unseen"])
    if "strides" in found:
        return Subsample(tuple(found["strides"]), found["zeros"], unseen)
    return Wanted(found["like"], found["rank"], tuple((up, down) for up, down in found["scale"]), unseen)


class Pass(NamedTuple):
    """What an example showed in one run of a stack."""

    shapes: Shapes
    arguments: tuple[str | int, ...]
    half: set[bool]
    tensors: set[bool]


def plan_of(stack: MaskedStack, name: str, passes: Sequence[Pass]) -> Plan:
    """What a frozen stack does, as an example showed."""
    together = isinstance(stack.aggregation, LayerAggregation)
    plans = {
        Plan(() if together else steps_of(stack, p.shapes), p.arguments, any(p.half), all(p.tensors)) for p in passes
    }
    if len(plans) != 1:
        times = f"{len(passes)} times, and not always alike in its arguments or in how sources are aligned"
        raise ConnectivityError(
            f"with this example the stack {name!r} was run {times if plans else 'not at all'}; "
            "an example that runs it, always alike, was needed."
        )
    return plans.pop()


def steps_of(stack: MaskedStack, shapes: Shapes) -> tuple[Step, ...]:
    """What a frozen stack does, given the output shapes of all its modules in an example."""
    masks, layout = stack.masks.settled(), stack.layout
    steps: list[Step] = []
    aligned: dict[tuple[int, Subsample | Wanted], int] = {}

    def reads(sources: Iterable[int], like: int) -> tuple[int, ...]:
        """Where the sources are found in the output shape of module `like`, after steps that bring them there."""
        numbers = []
        for k in sources:
            how = _alignment(stack, shapes, k, like)
            if how is not None and (k, how) not in aligned:
                aligned[k, how] = len(shapes) + len(aligned)
                shaped = (how.like,) if isinstance(how, Wanted) and how.like is not None else ()
                steps.append(Step(aligned[k, how], (k, *shaped), how))
            numbers.append(k if how is None else aligned[k, how])
        return tuple(numbers)

    for number in (number for number, alive in enumerate(masks.alive) if alive):
        row = masks.sources[number]
        steps.append(Step(number, reads(row, layout.before(number)) if row else ()))
    if layout.layered:
        last = layout.layers[-1]
        everything = reads(last, last[-1])
        steps.append(Step(len(shapes) + len(aligned), everything))
    return tuple(steps)


def _alignment(stack: MaskedStack, shapes: Shapes, k: int, like: int) -> Subsample | Wanted | None:
    """How module k is brought into the output shape of module `like`, which perhaps does not stay."""
    found, wanted = shapes[k], shapes[like]
    if k == like or found is None or wanted is None:
        return None
    if stack.align is None:
        axes = range(2, len(found)) if len(found) > 3 else ()
        strides = tuple(_scale(found[axis], wanted[axis])[1] for axis in axes)
        unseen = tuple((axis, found[axis]) for axis in axes if wanted[axis] == 1)  # any stride leads to 1 position
        return Subsample(strides, wanted[1] - found[1], unseen) if found != wanted or unseen else None
    if found == wanted:
        return None
    alive = stack.masks.settled().alive
    same = next((m for m in reversed(range(like + 1)) if alive[m] and shapes[m] == wanted), None)
    lengths = list(zip((*found, *(1 for _ in wanted)), wanted, strict=False))
    scale = tuple(_scale(*pair) if axis < len(found) else (pair[1], 1) for axis, pair in enumerate(lengths))
    unseen = tuple((axis, n) for axis, (n, m) in enumerate(lengths) if n != m == 1 or min(scale[axis]) > 1)
    return Wanted(same, len(found), scale, unseen if same is None else ())


def _scale(found: int, wanted: int) -> tuple[int, int]:
    """`up` and `down` that lead from a length to another: 1 and a stride where `align` has one."""
    view = align(torch.empty(1, 1, found, 1, device="meta"), Size((1, 1, wanted, 1)))
    return Fraction(wanted, max(found, 1)).as_integer_ratio() if view is None else (1, view.stride(2))


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[MaskedStack, list[Pass]]]:
    """Note the output shapes of all modules in each pass of each stack, of the unused ones too."""
    seen: dict[MaskedStack, list[Pass]] = {stack: [] for _, stack in stacks_of(model)}

    def begin(stack: MaskedStack, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack._shapes.clear()  # so that unused modules run too, for their shapes
        seen[stack].append(Pass([], (*range(1, len(args)), *kwargs), set(), set()))

    def note(stack: MaskedStack, module: nn.Module, _: Any, y: Any) -> None:
        shapes, _, half, tensors = seen[stack][-1] if seen[stack] else Pass([], (), set(), set())
        if seen[stack] and len(shapes) < len(stack.flat()):  # else the model runs the module by itself, too
            shapes.append(y.shape if isinstance(y, Tensor) and not y.is_nested else None)
            half.add(isinstance(y, Tensor) and y.dtype == torch.float16)
            tensors.add(isinstance(y, Tensor))

    handles = [stack.register_forward_pre_hook(begin, with_kwargs=True) for stack in seen]
    for stack in seen:
        handles += [module.register_forward_hook(partial(note, stack)) for module in dict.fromkeys(stack.flat())]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def alive_blocks(stack: MaskedStack) -> nn.ModuleDict:
    """The modules that stay, under the numbers that they had."""
    alive = iter(stack.masks.settled().alive)

    def kept(modules: nn.ModuleList, inside: bool) -> nn.ModuleDict:
        found = nn.ModuleDict().train(stack.training)
        for number, module in enumerate(modules):
            if inside:
                found[str(number)] = kept(cast(nn.ModuleList, module), False)
            elif next(alive):
                found[str(number)] = module
        return found

    return kept(stack.blocks, stack.layout.layered)
