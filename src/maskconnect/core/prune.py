"""Unused modules out, a plain network back (D10), and the proof that it computes the same.

Modules that cannot reach the output go. Those that stay are wired for good, in a graph without masks (`plain.py`), in
which, if asked for, batch norms are folded into convolutions (`fold.py`) and those that read the same are merged
(`merge.py`).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from maskconnect.core.count import PrunedCount, pruned_parameters, stacks_of
from maskconnect.core.fold import fold_
from maskconnect.core.inputs import cloned
from maskconnect.core.merge import merge_
from maskconnect.core.plain import plain_network
from maskconnect.core.plan import Plan, plan_of, watched
from maskconnect.core.sums import pad_once_, share_, write_over_
from maskconnect.errors import ConfigError, ConnectivityError

__all__ = ["NOTES", "PrunedCount", "apply", "check", "difference", "prune", "pruned_parameters"]

logger = logging.getLogger("maskconnect")

NOTES = "maskconnect"
"""Under which name the graphs of a pruned network note, in their `meta`, how they were made."""

RANDOM_INPUTS = 2
"""On how many random inputs a pruned network is compared, beside the example."""


def prune(
    model: nn.Module, example: Any, *args: Any, fold: bool = False, merge: bool = True, **kwargs: Any
) -> nn.Module:
    """A copy of a frozen model without masks and without the modules that cannot reach the output.

    `model(example, *args, **kwargs)` is run in eval mode, which shows how sources are to be aligned. Inputs of other
    sizes work afterwards, where the outputs of modules grow with them; an example so small that strides do not show
    serves its own size only. What comes back is plain: nothing of maskconnect is in it, and a stack has become a
    `torch.fx.GraphModule`, with no further arguments than the example had. It is checked to compute the same, on the
    example and on random inputs. The model itself does not change.

    Args:
        fold: fold batch norms into the convolutions before them: faster, and for inference only.
        merge: make one convolution of those that read the same, or are summed. Without `fold` and `merge` the names of
            weights are those of the model.
    """
    return prune_and_compare(model, (example, *args), kwargs, fold=fold, merge=merge)[0]


def prune_and_compare(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, fold: bool, merge: bool
) -> tuple[nn.Module, float]:
    """The pruned network, and by how much its outputs differ from the model's, relative to the largest."""
    stacks = stacks_of(model)
    if not stacks:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("the model is wrapped in DistributedDataParallel; call mc.prune(model.module, ...).")
    if not all(stack.masks.is_frozen for _, stack in stacks):
        raise ConnectivityError("the wiring of this model is still being learned; freeze it first: mc.freeze(model).")
    pruned = copy.deepcopy(model)
    with watched(pruned) as seen:
        _output(pruned, *args, **(kwargs or {}))
    plans = {name: plan_of(stack, name, seen[stack]) for name, stack in stacks_of(pruned)}
    pruned = apply(pruned, plans, fold=fold, merge=merge)
    apart = check(model, pruned, args, kwargs or {}, exact=not (fold or merge))
    logger.info("pruned; the largest difference of outputs is %.1e of the largest output", apart)
    return pruned, apart


def apply(model: nn.Module, plans: Mapping[str, Plan], *, fold: bool, merge: bool) -> nn.Module:
    """The plain network of a model whose stacks do what `plans` say; it is made of the model's own modules.

    Every graph in it notes how it was made, as plain data, so that it can be made again.
    """
    stacks = {name: {"wiring": stack.wiring(), **plans[name].describe()} for name, stack in stacks_of(model)}
    network = plain_network(model, plans)
    for name, part in list(network.named_modules()):
        if isinstance(part, fx.GraphModule):
            if fold:
                fold_(part)
            if merge:
                merge_(part)
                pad_once_(part)
                share_(part)
                write_over_(part)
            part.graph.lint()
            part.delete_all_unused_submodules()
            part.recompile()
            part.meta[NOTES] = {
                **part.meta.get(NOTES, {}),
                "path": name,
                "fold": fold,
                "merge": merge,
                "stacks": stacks,
            }
    return network


def check(model: nn.Module, pruned: nn.Module, args: Any, kwargs: Mapping[str, Any], *, exact: bool) -> float:
    """The largest difference of the outputs on the given input and on random ones; an error if it is too large."""
    largest = 0.0
    for seed in range(1 + RANDOM_INPUTS):
        given = (args, dict(kwargs)) if seed == 0 else _random_like((args, dict(kwargs)), seed)
        try:
            expected = _output(model, *given[0], **given[1])
        except Exception:
            if seed == 0:
                raise
            continue  # not every model takes any numbers
        apart, allowed = _apart(expected, _output(pruned, *given[0], **given[1])), tolerance(expected, exact=exact)
        if apart > allowed:
            what = "on a random input " if seed else ""
            raise ConnectivityError(
                f"{what}the pruned network differs from the model by {apart:.1e} of the largest output, more than "
                f"{allowed:.0e}; perhaps the model is random in eval mode, or hooks change what its stacks compute."
            )
        largest = max(largest, apart)
    return largest


def _random_like(given: Any, seed: int) -> Any:
    """Normal numbers, with the mean and the spread of those given; what is not a real number stays."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(y: Tensor) -> Tensor:
        if not y.is_floating_point() or y.is_nested or not y.isfinite().all() or not y.numel():
            return y
        noise = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
        spread = y.double().std(correction=0)
        return (y.double().mean() + noise * torch.where(spread > 0, spread, 1)).to(y.dtype)

    return tree_map_only(Tensor, drawn, given)


def difference(model: nn.Module, pruned: nn.Module, x: Any, *args: Any, **kwargs: Any) -> float:
    """The largest difference of the outputs of two models in eval mode, relative to the largest output of the first."""
    return _apart(_output(model, x, *args, **kwargs), _output(pruned, x, *args, **kwargs))


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


def tolerance(output: Any, *, exact: bool) -> float:
    """1e-12 in float64, 1e-5 in float32, and what half precision can tell apart; ten times that where sums are others.

    Folding and merging change weights and the order in which things are added up.
    """
    kinds = {leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    least = max((1e-12 if kind == torch.float64 else max(1e-5, torch.finfo(kind).eps) for kind in kinds), default=1e-5)
    return least if exact else 10 * least
