"""The steps of a frozen stack, as plain data without masks (D10).

An example shows how sources are aligned to the shapes that their readers need: with which strides they are subsampled,
and how many channels of zeros are added.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Size, nn

from maskconnect.core.align import align
from maskconnect.core.layers import LayerAggregation
from maskconnect.core.outputs import Shapes
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConnectivityError, shown
from maskconnect.pruning.example import Pass

Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Subsample:
    """How `align` changed a source in the example."""

    like: int | None  # a module that stays, whose positions the source must have afterwards
    strides: tuple[int, ...]  # of the axes after the channels
    zeros: int  # how many channels are added
    unseen: Axes  # axes whose strides the example did not show, and their lengths in it


@dataclass(frozen=True)
class Wanted:
    """The shape that an `align` of the user must produce: that of a module that stays, or a scaled source shape."""

    like: int | None
    rank: int  # the number of axes of the source
    scale: Axes  # n becomes n * up / down, rounded up; a new axis has the length `up`
    unseen: Axes


@dataclass(frozen=True)
class Step:
    """Run a module, align an output, or compute the output of layers; the result gets `number`."""

    number: int  # of a module; results of other steps get further numbers
    reads: tuple[int, ...]  # empty for the input of the stack
    how: Subsample | Wanted | None = None  # for steps that align


@dataclass(frozen=True)
class Plan:
    """A stack as steps; empty for dense blocks and layers whose inputs are computed together."""

    steps: tuple[Step, ...] = ()
    arguments: tuple[str | int, ...] = ()  # further arguments of the stack: names or positions
    half: bool = False  # whether outputs are in float16, in which sums may overflow
    tensors: bool = True  # whether all outputs are tensors

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Plan:
        """Read a plan from the result of `describe`; raise a ValueError, KeyError or TypeError if it is invalid.

        The data is untrusted, and names become code, so everything is checked.
        """
        steps = [Step(_number(s["number"]), tuple(map(_number, s["reads"])), _how(s["how"])) for s in found["steps"]]
        for name in found["arguments"]:
            if not is_argument(name):
                raise ValueError(f"{shown(name)} is not a valid argument name")
        for name in ("half", "tensors"):
            if not isinstance(found[name], bool):
                raise ValueError(f"{name} is {shown(found[name])}; it must be true or false")
        return cls(tuple(steps), tuple(found["arguments"]), found["half"], found["tensors"])


def is_argument(name: object) -> bool:
    """Return whether this is a valid position or name of an argument."""
    if isinstance(name, str):
        return name.isidentifier() and not keyword.iskeyword(name)
    return type(name) is int and 0 < name < 256


def _number(found: object) -> int:
    if type(found) is not int or not 0 <= found < 2**40:
        raise ValueError(f"{shown(found)} is not a valid number in a plan")
    return found


def _how(found: Mapping[str, Any] | None) -> Subsample | Wanted | None:
    if found is None:
        return None
    like = None if found["like"] is None else _number(found["like"])
    unseen, scale = (
        tuple((_number(first), _number(second)) for first, second in found.get(name, ()))
        for name in ("unseen", "scale")
    )
    if "strides" in found:
        return Subsample(like, tuple(map(_number, found["strides"])), _number(found["zeros"]), unseen)
    return Wanted(like, _number(found["rank"]), scale, unseen)


def plan_of(stack: MaskedStack, name: str, passes: Sequence[Pass]) -> Plan:
    """Return the plan of a frozen stack, from the passes of an example."""
    together = isinstance(stack.aggregation, LayerAggregation) or stack.aggregation == "concat"
    plans = {
        Plan(() if together else steps_of(stack, p.shapes, p.input), p.arguments, p.half == {True}, all(p.tensors))
        for p in passes
    }
    if len(plans) != 1:
        times = f"ran {len(passes)} times, with different arguments or shapes"
        raise ConnectivityError(
            f"with this example, the stack {name!r} {times if plans else 'did not run'}; "
            "pass an example for which it runs, each time with arguments of the same form and shape."
        )
    return plans.pop()


def steps_of(stack: MaskedStack, shapes: Shapes, first: Size | None) -> tuple[Step, ...]:
    """Return the steps of a frozen stack, from its input shape and all output shapes in an example."""
    masks, layout = stack.masks.current_wiring(), stack.layout
    steps: list[Step] = []
    always: tuple[int, ...] = ()  # what every target reads in addition to its sources
    if stack.aggregation == "stream":
        number = len(shapes)
        always, shapes = (number,), [*shapes, first]
        steps.append(Step(number, ()))
    aligned: dict[tuple[int, Subsample | Wanted], int] = {}

    def reads(sources: Iterable[int], like: int) -> tuple[int, ...]:
        """Return the numbers of sources in the output shape of module `like`; add steps that align them."""
        numbers = []
        for k in sources:
            how = _alignment(stack, shapes, k, like)
            if how is not None and (k, how) not in aligned:
                aligned[k, how] = len(shapes) + len(aligned)
                shaped = () if how.like is None else (how.like,)
                steps.append(Step(aligned[k, how], (k, *shaped), how))
            numbers.append(k if how is None else aligned[k, how])
        return tuple(numbers)

    for number in (number for number, alive in enumerate(masks.alive) if alive):
        row = masks.sources[number]
        steps.append(Step(number, reads((*always, *row), layout.before(number)) if row else ()))
    if layout.layered or layout.all_out:
        everything = reads((*always, *layout.outputs), layout.layers[-1][-1])
        steps.append(Step(len(shapes) + len(aligned), everything))
    return tuple(steps)


def _alignment(stack: MaskedStack, shapes: Shapes, k: int, like: int) -> Subsample | Wanted | None:
    """Return how module k is aligned to the output shape of module `like`, which may not stay."""
    found, wanted = shapes[k], shapes[like]
    if k == like or found is None or wanted is None:
        return None
    alive = stack.masks.current_wiring().alive
    same = next((m for m in reversed(range(like + 1)) if alive[m] and shapes[m] == wanted), None)
    if stack.align is None:
        axes = range(2, len(found)) if len(found) > 3 else ()
        strides = tuple(_scale(found[axis], wanted[axis])[1] for axis in axes)
        # Any large stride gives 1 position, and for other lengths `align` may choose a power of two.
        unseen = tuple((a, found[a]) for a, s in zip(axes, strides, strict=True) if wanted[a] == 1 or s & (s - 1))
        return Subsample(same, strides, wanted[1] - found[1], unseen) if found != wanted or unseen else None
    if found == wanted:
        return None
    lengths = list(zip((*found, *(1 for _ in wanted)), wanted, strict=False))
    scale = tuple(_scale(*pair) if axis < len(found) else (pair[1], 1) for axis, pair in enumerate(lengths))
    unseen = tuple((axis, n) for axis, (n, m) in enumerate(lengths) if n != m == 1 or min(scale[axis]) > 1)
    return Wanted(same, len(found), scale, unseen if same is None else ())


def _scale(found: int, wanted: int) -> tuple[int, int]:
    """Return `up` and `down` that scale one length to another: 1 and a stride if `align` has one."""
    view = align(torch.empty(1, 1, found, 1, device="meta"), Size((1, 1, wanted, 1)))
    return Fraction(wanted, max(found, 1)).as_integer_ratio() if view is None else (1, view.stride(2))


def alive_blocks(stack: MaskedStack) -> nn.ModuleDict:
    """Return the modules that stay, under the same numbers."""
    alive = iter(stack.masks.current_wiring().alive)

    def kept(modules: nn.ModuleList, inside: bool) -> nn.ModuleDict:
        found = nn.ModuleDict().train(stack.training)
        for number, module in enumerate(modules):
            if inside:
                found[str(number)] = kept(cast(nn.ModuleList, module), False)
            elif next(alive):
                found[str(number)] = module
        return found

    return kept(stack.blocks, stack.layout.layered)
