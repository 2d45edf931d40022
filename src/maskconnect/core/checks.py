"""Checks of a stack: its arguments when it is built, and the scale of its activations during training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.align import ALIGNS
from maskconnect.core.residual import is_pair
from maskconnect.core.wiring import Layout, Sources, random_wiring
from maskconnect.errors import ConfigError, ConnectivityError, integer, shown, unknown_name

CONNECTIVITIES = ("learned", "prev", "full", "random")
MAX_GROWTH = 1e4
"""The largest growth of activations from the first module to the output, before a warning."""
AGGREGATIONS = ("mean", "residual", "stream", "sum", "scaled")


def check_options(aggregation: Any, align: Any, use_all: Any, seed: Any, allowed: Sequence[str]) -> None:
    """Raise an error if an argument that can be checked alone is invalid."""
    if not callable(aggregation) and not (isinstance(aggregation, str) and aggregation in allowed):
        raise unknown_name("aggregation", aggregation, allowed, or_else=", or a callable")
    if align is not None and not callable(align) and not (isinstance(align, str) and align in ALIGNS):
        raise ConfigError(f"align is {shown(align)}; it must be 'nhwc' or a callable fn(source, shape).")
    if not isinstance(use_all, bool):
        raise ConfigError(f"use_all is {shown(use_all)}; it must be True or False.")
    if not 0 <= integer("seed", seed) < 2**63:
        raise ConfigError(f"seed is {seed}; it must be at least 0 and below 2**63.")


def decay_of(mask_init: Any) -> float:
    """Return the initial ratio from each candidate to the next nearer one; 1 for "uniform"."""
    if isinstance(mask_init, str) and mask_init == "uniform":
        return 1.0
    if not isinstance(mask_init, Real) or isinstance(mask_init, bool) or not 0 < float(mask_init) <= 1:
        raise ConfigError(f"mask_init is {shown(mask_init)}; it must be 'uniform', or a number above 0 and up to 1.")
    return float(mask_init)


def register(modules: Iterable[Any], aggregation: Any) -> tuple[nn.ModuleList, Layout]:
    """Return the modules in an `nn.ModuleList`, and their layout."""
    if not isinstance(modules, Iterable):
        raise ConfigError(f"modules is a {type(modules).__name__}; it must be a list of modules, or a list of lists.")
    given = list(modules)
    if not given:
        raise ConfigError("modules is empty; a stack needs at least 1 module.")
    layered = [isinstance(item, list | tuple | nn.ModuleList) for item in given]
    if not any(layered):
        layout = Layout((1,) * len(given), layered=False, all_out=aggregation in ("stream", "concat"))
        return nn.ModuleList(_checked(given, "modules")), layout
    if not all(layered):
        mixed = layered.index(not layered[0])
        raise ConfigError(f"modules mixes modules and lists of modules (entry {mixed}); give only one kind.")
    if aggregation == "stream":
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
    """Return K_j of every target, at most its number of candidates (D5)."""
    if fan_in is None:
        return None
    targets = layout.targets
    one_each = isinstance(fan_in, Sequence) and not isinstance(fan_in, str)
    wanted = list(fan_in) if one_each else [fan_in] * len(targets)
    if len(wanted) != len(targets):
        raise ConfigError(
            f"fan_in has {len(wanted)} entries; the stack has {len(targets)} targets (all modules except the first"
            f"{'' if targets.start == 1 else f' {targets.start}'}). Give one number, or one number per target."
        )
    for k in wanted if one_each else [fan_in]:
        if integer("fan_in", k) < 1:
            raise ConfigError(f"fan_in is {k}; a target needs at least 1 source. Set fan_in to 1 or more.")
    return [min(int(k), len(candidates[target])) for target, k in zip(targets, wanted, strict=True)]


def warn_of_fan_in(fan_in: Any, candidates: Sources, *, what: str = "fan_in") -> None:
    """Warn if no target has as many candidates as this fan-in."""
    most = max(map(len, candidates), default=0)
    if isinstance(fan_in, int) and fan_in > most > 0:
        warnings.warn(f"{what} is {fan_in}, but no module has more than {most} candidates: K is {most}.", stacklevel=3)


def fixed_sources(
    connectivity: Any,
    layout: Layout,
    candidates: Sources,
    fan_in: list[int] | None,
    seed: int,
    *,
    use_all: bool = False,
) -> Sources | None:
    """Return the sources of every module by a fixed rule or an explicit wiring; None if they are learned."""
    if not isinstance(connectivity, str):
        fixed = layout.from_plain(connectivity, what="connectivity")
    elif connectivity == "full":
        fixed = candidates
    elif connectivity == "prev":
        fixed = layout.prev()
    elif connectivity not in CONNECTIVITIES:
        raise unknown_name("connectivity", connectivity, CONNECTIVITIES, or_else=", or a wiring")
    elif fan_in is None:
        raise ConfigError(f"connectivity {shown(connectivity)} needs fan_in, the number of sources per target.")
    elif connectivity == "random" or not layout.targets:
        fixed = random_wiring(layout, candidates, fan_in, seed, use_all=use_all)
    else:
        return None
    for module, row in enumerate(fixed):
        if not set(row) <= set(candidates[module]):
            raise ConnectivityError(
                f"connectivity: {layout.name(module)} reads {list(row)}; `wiring` allows {list(candidates[module])}."
            )
    return fixed


class GrowthWatch:
    """Warns once if activations grow too much, as with aggregation="sum" (D1).

    It checks forward passes 1, 2, 4, 8, ... of a stack in train mode.
    """

    def __init__(self) -> None:
        self._passes, self._warned = 0, False

    def look(self, first: Any, last: Any) -> None:
        """Compare the output of the first module with that of the stack."""
        first = first[0] if is_pair(first) else first
        if torch.compiler.is_compiling() or self._warned or not (_has_values(first) and _has_values(last)):
            return
        self._passes += 1
        if self._passes & (self._passes - 1):
            return
        start = _scale(first)
        growth = _scale(last) / start if start else 0.0
        if growth > MAX_GROWTH:  # False for NaN, which the loss will show
            self._warned = True
            warnings.warn(
                f"activations grow {growth:.1e} times from the first module to the last, more than {MAX_GROWTH:.0e}: "
                "training will probably diverge. If the aggregation is 'sum', use 'mean'.",
                stacklevel=5,
            )


def _has_values(x: Any) -> bool:
    """Return whether x has values: it is not meta, fake or traced, and no CUDA graph is being recorded."""
    if (
        type(x) is not Tensor
        or x.is_meta
        or not x.is_floating_point()
        or not x.numel()
        or torch._C._get_tracing_state()
    ):
        return False
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (recording or torch._C._functorch.is_functorch_wrapped_tensor(x))


def _scale(x: Tensor) -> float:
    """Return the root mean square."""
    return float(x.detach().float().square().mean().sqrt())
