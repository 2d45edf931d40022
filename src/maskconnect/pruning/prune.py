"""Unused modules out, a plain network back (D10), and the proof that it computes the same.

Modules that cannot reach the output go. Those that stay are wired for good, in a graph without masks (`emit.py`), in
which, if asked for, batch norms are folded into convolutions and those that read the same are merged (`passes`).
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
from maskconnect.pruning.graphs import is_graph_of_ours, note_
from maskconnect.pruning.passes.fold_norms import fold_
from maskconnect.pruning.passes.inplace import write_over_
from maskconnect.pruning.passes.merge_convs import merge_
from maskconnect.pruning.passes.share_sums import pad_once_, share_
from maskconnect.pruning.plan import Plan, plan_of
from maskconnect.pruning.rewired import built_stacks_of, find_unused_
from maskconnect.pruning.verify import check, difference, output_of
from maskconnect.retrofit.stack import TappedStack

__all__ = ["PrunedCount", "apply", "difference", "prune", "prune_and_compare", "pruned_parameters"]

logger = logging.getLogger("maskconnect")

NOTHING: Any = object()
"""An example that is not given: all arguments are given by name."""


def prune(
    model: nn.Module, example: Any = NOTHING, *args: Any, fold: bool = False, merge: bool = True, **kwargs: Any
) -> nn.Module:
    """A copy of a frozen model without masks and without the modules that cannot reach the output.

        slim = mc.prune(resnet, torch.randn(1, 3, 32, 32))
        slim = mc.prune(llama, input_ids=ids)  # or mc.prune(llama, example=tokenizer("...", return_tensors="pt"))

    `model(example, *args, **kwargs)` is run in eval mode, which shows how sources are to be aligned. Inputs of other
    sizes work afterwards, where the outputs of modules grow with them; an example so small that strides do not show
    serves its own size only. What comes back is plain: nothing of maskconnect is in it, and a stack has become a
    `torch.fx.GraphModule`, with no further arguments than the example had. It is checked to compute the same, on the
    example and on random inputs. The model itself does not change.

    A model that `mc.rewire` rewired stays what it was, with its own lists. A block that goes leaves a pass-through in
    its place, because the model's code may count its blocks; names of weights stay. A block that nothing reads, but
    whose output the model uses otherwise, stays.

    Args:
        example: an input of the model; a dict whose keys are the names of its arguments is passed by name.
        fold: fold batch norms into the convolutions before them: faster, and for inference only.
        merge: make one convolution of those that read the same, or are summed. Without `fold` and `merge` the names of
            weights are those of the model.
    """
    args, kwargs = arguments_of(model, example, args, kwargs)
    return prune_and_compare(model, args, kwargs, fold=fold, merge=merge)[0]


def arguments_of(
    model: nn.Module, example: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for."""
    named = dict(kwargs or {})
    if example is NOTHING:
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
    """The pruned network, and by how much its outputs differ from the model's, relative to the largest."""
    stacks = stacks_of(model)
    if not stacks:
        raise ConfigError(f"there is no MaskedStack in this {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("the model is wrapped in DistributedDataParallel; call mc.prune(model.module, ...).")
    if not all(stack.masks.is_frozen for _, stack in stacks):
        raise ConnectivityError("the wiring of this model is still being learned; freeze it first: mc.freeze(model).")
    pruned = copy.deepcopy(model)
    find_unused_(pruned, args, kwargs or {})
    with watched(pruned) as seen:
        output_of(pruned, *args, **(kwargs or {}))
    plans = {name: plan_of(stack, name, seen[stack]) for name, stack in built_stacks_of(pruned)}
    pruned = apply(pruned, plans, fold=fold, merge=merge)
    apart = check(model, pruned, args, kwargs or {}, exact=not (fold or merge))
    logger.info("pruned; the largest difference of outputs is %.1e of the largest output", apart)
    return pruned, apart


def apply(model: nn.Module, plans: Mapping[str, Plan], *, fold: bool, merge: bool) -> nn.Module:
    """The plain network of a model whose stacks do what `plans` say; it is made of the model's own modules.

    Every graph in it notes how it was made, as plain data, so that it can be made again.
    """
    stacks = {}
    for name, stack in stacks_of(model):
        how = rewired.describe(stack) if isinstance(stack, TappedStack) else plans[name].describe()
        stacks[name] = {"wiring": stack.wiring(), "aggregation": stack.described_aggregation(), **how}
    first = next(iter(rewired.rewired_stacks_of(model)), "")
    network = rewired.without_unused(model, {"path": first, "fold": fold, "merge": merge, "stacks": stacks})
    network = plain_network(network, plans)
    for name, part in list(network.named_modules()):
        if is_graph_of_ours(part):
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
