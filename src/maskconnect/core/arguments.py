"""The arguments of a stack, checked once: what was found, what was needed, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from torch import nn

from maskconnect.core.cover import random_wiring
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConfigError, ConnectivityError, integer, unknown_name

CONNECTIVITIES = ("learned", "prev", "full", "random")
AGGREGATIONS = ("mean", "residual", "stream", "sum", "root", "scaled")
CREDITS = ("whole", "new")


def check_options(aggregation: Any, align: Any, use_all: Any, seed: Any) -> None:
    """The arguments that need nothing but a look."""
    if not callable(aggregation) and not (isinstance(aggregation, str) and aggregation in AGGREGATIONS):
        raise unknown_name("aggregation", aggregation, AGGREGATIONS, or_else=", or a callable")
    if align is not None and not callable(align):
        raise ConfigError(f"align is {align!r}; it must be a callable fn(source, shape).")
    if not isinstance(use_all, bool):
        raise ConfigError(f"use_all is {use_all!r}; it must be True or False.")
    if not 0 <= integer("seed", seed) < 2**63:
        raise ConfigError(f"seed is {seed}; it must be at least 0 and below 2**63.")


def check_credit(mask_credit: Any, aggregation: Any) -> None:
    """What of a source counts for its mask can be chosen where we add up the sources ourselves."""
    if not isinstance(mask_credit, str) or mask_credit not in CREDITS:
        raise unknown_name("mask_credit", mask_credit, CREDITS)
    if mask_credit == "new" and (callable(aggregation) or aggregation in ("scaled", "stream")):
        raise ConfigError("mask_credit is 'new'; it works with the aggregations mean, residual, sum and root only.")


def decay_of(mask_init: Any) -> float:
    """How much less likely each candidate starts than the next nearer one: not at all, or as `mask_init` says."""
    if isinstance(mask_init, str) and mask_init == "uniform":
        return 1.0
    if not isinstance(mask_init, Real) or isinstance(mask_init, bool) or not 0 < float(mask_init) <= 1:
        raise ConfigError(f"mask_init is {mask_init!r}; it must be 'uniform', or a number above 0 and up to 1.")
    return float(mask_init)


def register(modules: Iterable[Any], aggregation: Any) -> tuple[nn.ModuleList, Layout]:
    """The modules, registered as they were given, and how they are laid out."""
    if not isinstance(modules, Iterable):
        raise ConfigError(f"modules is a {type(modules).__name__}; it must be a list of modules, or of lists of them.")
    given = list(modules)
    if not given:
        raise ConfigError("modules is empty; a stack needs at least 1 module.")
    layered = [isinstance(item, list | tuple | nn.ModuleList) for item in given]
    if not any(layered):
        layout = Layout((1,) * len(given), layered=False, all_out=aggregation == "stream")
        return nn.ModuleList(_checked(given, "modules")), layout
    if not all(layered):
        mixed = layered.index(not layered[0])
        raise ConfigError(f"modules mixes modules and lists of modules (entry {mixed}); give one kind or the other.")
    if aggregation in ("scaled", "stream"):
        raise ConfigError(f"aggregation is {aggregation!r}; that is for a list of modules, not for a list of lists.")
    layers = [nn.ModuleList(_checked(list(layer), f"modules[{i}]")) for i, layer in enumerate(given)]
    return nn.ModuleList(layers), Layout(tuple(map(len, layers)), layered=True)


def _checked(modules: list[Any], what: str) -> list[nn.Module]:
    if not modules:
        raise ConfigError(f"{what} is empty; a layer needs at least 1 module.")
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{what}[{i}] is {type(module).__name__}; it must be an nn.Module.")
    return modules


def fan_in_of_targets(fan_in: Any, layout: Layout, candidates: Sources) -> list[int] | None:
    """K_j of every target: no more than it has candidates (D5)."""
    if fan_in is None:
        return None
    targets = layout.targets
    one_each = isinstance(fan_in, Sequence) and not isinstance(fan_in, str)
    wanted = list(fan_in) if one_each else [fan_in] * len(targets)
    if len(wanted) != len(targets):
        raise ConfigError(
            f"fan_in has {len(wanted)} entries; the stack has {len(targets)} targets, which are all its modules but "
            f"the first {targets.start}. Give one number, or one a target."
        )
    for k in wanted if one_each else [fan_in]:
        if integer("fan_in", k) < 1:
            raise ConfigError(f"fan_in is {k}; a target needs at least 1 source. Set fan_in to 1 or more.")
    return [min(int(k), len(candidates[target])) for target, k in zip(targets, wanted, strict=True)]


def fixed_sources(
    connectivity: Any,
    layout: Layout,
    candidates: Sources,
    fan_in: list[int] | None,
    seed: int,
    *,
    use_all: bool = False,
) -> Sources | None:
    """What a fixed rule, or an explicit wiring, makes every module read; None where that is to be learned."""
    if not isinstance(connectivity, str):
        fixed = layout.from_plain(connectivity, what="connectivity")
    elif connectivity == "full":
        fixed = candidates
    elif connectivity == "prev":
        fixed = layout.prev()
    elif connectivity not in CONNECTIVITIES:
        raise unknown_name("connectivity", connectivity, CONNECTIVITIES, or_else=", or a wiring")
    elif fan_in is None:
        raise ConfigError(f"connectivity {connectivity!r} needs fan_in: how many sources a target reads.")
    elif connectivity == "random" or not layout.targets:
        fixed = random_wiring(layout, candidates, fan_in, seed, use_all=use_all)
    else:
        return None
    for module, row in enumerate(fixed):
        if not set(row) <= set(candidates[module]):
            raise ConnectivityError(f"connectivity has {layout.name(module)} read what `wiring` does not allow it.")
    return fixed
