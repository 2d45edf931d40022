"""Unused modules out, a plain network back (D10).

Modules that cannot reach the output go. Those that stay have their sources written down: which they are, by what
strides they are subsampled and how many channels of zeros they get, as an example shows. No mask is left.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from maskconnect.core.align import align
from maskconnect.core.count import PrunedCount, pruned_parameters, stacks_of
from maskconnect.core.inputs import cloned
from maskconnect.core.layerwise import LayerAggregation
from maskconnect.core.outputs import Shapes
from maskconnect.core.plain import PlainLayers, PlainStack, Step, Subsample, Wanted
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError, ConnectivityError

__all__ = ["PlainLayers", "PlainStack", "PrunedCount", "difference", "prune", "pruned_parameters"]


def prune(model: nn.Module, example: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """A copy of a frozen model without masks and without the modules that cannot reach the output.

    `model(example, *args, **kwargs)` is run in eval mode, which shows how sources are to be aligned. Inputs of other
    sizes work afterwards, where the outputs of modules grow with them; an example so small that strides do not show
    serves its own size only. The copy is in the mode that the model is in, keeps the names of weights, and is checked
    to compute the same. The model itself does not change.
    """
    stacks = stacks_of(model)
    if not stacks:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("the model is wrapped in DistributedDataParallel; call mc.prune(model.module, ...).")
    if not all(stack.masks.is_frozen for _, stack in stacks):
        raise ConnectivityError("the wiring of this model is still being learned; freeze it first: mc.freeze(model).")
    pruned = copy.deepcopy(model)
    with _watched(pruned) as seen:
        expected = _output(pruned, example, *args, **kwargs)
    pruned = _replaced(pruned, seen)
    apart, allowed = _apart(expected, _output(pruned, example, *args, **kwargs)), _tolerance(expected)
    if apart > allowed:
        raise ConnectivityError(
            f"the pruned network differs from the model by {apart:.1e} of the largest output, more than {allowed:.0e}; "
            "perhaps the model is random in eval mode, or hooks change what its stacks compute."
        )
    return pruned


def difference(model: nn.Module, pruned: nn.Module, x: Any, *args: Any, **kwargs: Any) -> float:
    """The largest difference of the outputs of two models in eval mode, relative to the largest output of the first."""
    return _apart(_output(model, x, *args, **kwargs), _output(pruned, x, *args, **kwargs))


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
        shared = masks.readers[row[0]] > 1 if row else number != layout.layers[0][-1]
        steps.append(Step(number, reads(row, layout.before(number)) if row else (), shared=shared))
    if layout.layered:
        last = layout.layers[-1]
        everything = reads(last, last[-1])
        steps.append(Step(len(shapes) + len(aligned), everything))
    last_reader = {k: step.number for step in steps for k in step.reads}
    return tuple(replace(s, done=tuple(k for k in s.reads if last_reader[k] == s.number)) for s in steps)


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
    scale = tuple(_scale(*pair) for pair in lengths)
    unseen = tuple((axis, n) for axis, (n, m) in enumerate(lengths) if n != m == 1 or min(scale[axis]) > 1)
    return Wanted(same, scale, unseen)


def _scale(found: int, wanted: int) -> tuple[int, int]:
    """`up` and `down` that lead from a length to another: 1 and a stride where `align` has one."""
    view = align(torch.empty(1, 1, found, 1, device="meta"), Size((1, 1, wanted, 1)))
    return Fraction(wanted, max(found, 1)).as_integer_ratio() if view is None else (1, view.stride(2))


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[MaskedStack, list[Shapes]]]:
    """Note the output shapes of all modules in each pass of each stack, of the unused ones too."""
    seen: dict[MaskedStack, list[Shapes]] = {stack: [] for _, stack in stacks_of(model)}

    def begin(stack: MaskedStack, _: Any) -> None:
        stack._shapes.clear()  # so that unused modules run too, for their shapes
        seen[stack].append([])

    def note(stack: MaskedStack, module: nn.Module, _: Any, y: Any) -> None:
        if seen[stack] and len(seen[stack][-1]) < len(stack.flat()):  # else the model runs the module by itself, too
            seen[stack][-1].append(y.shape if isinstance(y, Tensor) and not y.is_nested else None)

    handles = [stack.register_forward_pre_hook(begin) for stack in seen]
    for stack in seen:
        handles += [module.register_forward_hook(partial(note, stack)) for module in dict.fromkeys(stack.flat())]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _replaced(model: nn.Module, seen: Mapping[MaskedStack, list[Shapes]]) -> nn.Module:
    """The model with a plain network in the place of every stack."""
    made: dict[MaskedStack, nn.Module] = {}
    for name, stack in stacks_of(model):
        if name not in dict(model.named_modules(remove_duplicate=False)):
            continue  # it was in a module that went
        if stack not in made:
            made[stack] = _plain(stack, name, seen[stack])
        if name == "":
            model = made[stack]
        else:
            model.set_submodule(name, made[stack])
    return model


def _plain(stack: MaskedStack, name: str, passes: list[Shapes]) -> nn.Module:
    if passes and isinstance(stack.aggregation, LayerAggregation):
        return PlainLayers(stack)
    plans = {steps_of(stack, shapes) for shapes in passes}
    if len(plans) != 1:
        times = f"{len(passes)} times, and its sources were not always aligned alike" if plans else "not at all"
        raise ConnectivityError(
            f"with this example the stack {name!r} was run {times}; an example that runs it, always alike, was needed."
        )
    return PlainStack(stack, plans.pop())


@torch.no_grad()
def _output(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a model returns in eval mode; neither its modes, nor the arguments, nor random numbers change."""
    modes = [(part, part.training) for part in model.modules()]
    given_args, given_kwargs = cloned((args, kwargs))
    try:
        model.eval()
        with torch.random.fork_rng(list({p.device for p in model.parameters() if p.is_cuda})):
            return model(*given_args, **given_kwargs)
    finally:
        model.train(modes[0][1])
        for part, mode in modes:
            part.training = mode


def _apart(expected: Any, found: Any) -> float:
    """The largest difference between the tensors of two outputs, relative to the largest entry of the expected one."""
    tensors = [[leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)] for y in (expected, found)]
    if not tensors[0]:
        raise ConnectivityError(f"the model returned a {type(expected).__name__} without tensors to compare.")
    if [y.shape for y in tensors[0]] != [y.shape for y in tensors[1]]:
        return math.inf
    return max(_ratio(*pair) for pair in zip(*tensors, strict=True))


def _ratio(expected: Tensor, found: Tensor) -> float:
    a, b = (y.cpu().to(torch.complex128 if y.is_complex() else torch.float64) for y in (expected, found))
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    largest = a.abs().nan_to_num(nan=0, posinf=0).max()
    return float(((a - b).abs()[~same] / largest).nan_to_num(nan=math.inf, posinf=math.inf).max())


def _tolerance(output: Any) -> float:
    """1e-12 in float64, 1e-5 in float32, and what half precision can tell apart."""
    kinds = {leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return max((1e-12 if kind == torch.float64 else max(1e-5, torch.finfo(kind).eps) for kind in kinds), default=1e-5)
