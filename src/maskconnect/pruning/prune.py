"""`mc.prune`: remove unused modules, return a plain network (D10), and check that it gives the same outputs.

Modules that cannot reach the output are removed. The others become a graph without masks (`emit.py`). On request, batch
norms are folded into convolutions, and convolutions with the same input are merged (`passes`).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.count import PrunedCount, pruned_parameters
from maskconnect.core.lookup import stacks_of
from maskconnect.errors import ConfigError, ConnectivityError
from maskconnect.pruning import rewired
from maskconnect.pruning.emit import plain_network
from maskconnect.pruning.example import watched
from maskconnect.pruning.graphs import is_pruned_graph, note_
from maskconnect.pruning.passes.fold_norms import fold_
from maskconnect.pruning.passes.inplace import write_over_
from maskconnect.pruning.passes.merge_convs import merge_
from maskconnect.pruning.passes.share_sums import pad_once_, share_
from maskconnect.pruning.plan import Plan, plan_of
from maskconnect.pruning.rewired import built_stacks_of, find_unused_
from maskconnect.pruning.verify import check, difference, output_of_example
from maskconnect.retrofit.stack import TappedStack

__all__ = ["PrunedCount", "apply", "difference", "prune", "prune_and_compare", "pruned_parameters"]

logger = logging.getLogger("maskconnect")

MISSING: Any = object()
"""Marks that no example is given, because all arguments are given by name."""


def prune(
    model: nn.Module, example: Any = MISSING, *args: Any, fold: bool = False, merge: bool = True, **kwargs: Any
) -> nn.Module:
    """Return a copy of a frozen model without masks, and without modules that cannot reach the output.

    The model runs once on the example in eval mode, which shows how sources are aligned. The pruned network also
    accepts inputs of other sizes, unless the example is too small to show the strides. Each stack becomes a plain
    `torch.fx.GraphModule` that takes the same arguments as in the example. The outputs of both networks are compared on
    the example and on random inputs. The model itself does not change.

    A model from `mc.rewire` keeps its own code and lists. A removed block leaves a pass-through in its place, because
    the code of the model may count its blocks. A block that no block reads stays if the model uses its output
    elsewhere.

    Args:
        model: a model whose stacks are all frozen.
        example: an input of the model. A dict whose keys are names of arguments is passed by name.
        args: further arguments of the model.
        fold: whether to fold batch norms into the convolutions before them: faster, for inference only. False by
            default.
        merge: whether to merge convolutions that have the same input or whose outputs are summed. True by default.
            Without `fold` and `merge`, the names of weights stay the same.
        kwargs: further keyword arguments of the model.

    Returns:
        The pruned network; only a rewired model still needs maskconnect, for the wires between its blocks.

    Raises:
        ConfigError: if the model has no `MaskedStack`, is wrapped in DistributedDataParallel, or rejects the example.
        ConnectivityError: if masks are not frozen, the example does not run every stack, or the outputs differ.

    Example:
        ```python
        mc.freeze(model)
        slim = mc.prune(model, torch.randn(1, 3, 32, 32))
        slim = mc.prune(llama, input_ids=ids)  # or: mc.prune(llama, tokenizer("...", return_tensors="pt"))
        ```
    """
    args, kwargs = arguments_of(model, example, args, kwargs)
    return prune_and_compare(model, args, kwargs, fold=fold, merge=merge)[0]


def arguments_of(
    model: nn.Module, example: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that an example stands for."""
    named = dict(kwargs or {})
    if example is MISSING:
        return args, named
    if isinstance(example, Mapping) and not args and isinstance(model, nn.Module):
        parameters = inspect.signature(model.forward).parameters
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if all(isinstance(name, str) and (any_name or name in parameters) for name in example):
            return (), {**example, **named}
    return (example, *args), named


def prune_and_compare(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, fold: bool, merge: bool
) -> tuple[nn.Module, float]:
    """Return the pruned network, and the largest difference of its outputs relative to the largest output."""
    stacks = stacks_of(model)
    if not stacks:
        raise ConfigError(
            f"there is no MaskedStack in this {type(model).__name__}; build one with mc.MaskedStack or mc.rewire."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("the model is wrapped in DistributedDataParallel; call mc.prune(model.module, ...).")
    if not all(stack.masks.is_frozen for _, stack in stacks):
        raise ConnectivityError("the wiring of this model is still being learned; freeze it first: mc.freeze(model).")
    if not args and not kwargs:
        raise ConfigError("the example is missing; pass an example input: mc.prune(model, x).")
    pruned = copy.deepcopy(model)
    find_unused_(pruned, args, kwargs or {})
    with watched(pruned) as seen:
        output_of_example(pruned, args, kwargs or {})
    plans = {name: plan_of(stack, name, seen[stack]) for name, stack in built_stacks_of(pruned)}
    pruned = apply(pruned, plans, fold=fold, merge=merge)
    largest = check(model, pruned, args, kwargs or {}, exact=not (fold or merge))
    logger.info("pruned; the largest difference of outputs is %.1e of the largest output", largest)
    return pruned, largest


def apply(model: nn.Module, plans: Mapping[str, Plan], *, fold: bool, merge: bool) -> nn.Module:
    """Return the plain network of a model whose stacks follow `plans`; it uses the modules of the model.

    Every graph in it notes how it was built, as plain data, so that a saved network can be rebuilt.
    """
    stacks = {}
    for name, stack in stacks_of(model):
        how = rewired.describe(stack) if isinstance(stack, TappedStack) else plans[name].describe()
        stacks[name] = {"wiring": stack.wiring(), "aggregation": stack.described_aggregation(), **how}
    first = next(iter(rewired.rewired_stacks_of(model)), "")
    network = rewired.without_unused(model, {"path": first, "fold": fold, "merge": merge, "stacks": stacks})
    network = plain_network(network, plans)
    for name, part in list(network.named_modules()):
        if is_pruned_graph(part):
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
            note_(part, path=name, fold=fold, merge=merge, stacks=stacks)
    return network
