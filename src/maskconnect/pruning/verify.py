"""By how much the outputs of two networks differ, and how much is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from maskconnect.core.targets import cloned
from maskconnect.errors import ConnectivityError

RANDOM_INPUTS = 2
"""On how many random inputs a pruned network is compared, beside the example."""


def check(model: nn.Module, pruned: nn.Module, args: Any, kwargs: Mapping[str, Any], *, exact: bool) -> float:
    """The largest difference of the outputs on the given input and on random ones; an error if it is too large."""
    largest = 0.0
    for seed in range(1 + RANDOM_INPUTS):
        given = (args, dict(kwargs)) if seed == 0 else _random_like((args, dict(kwargs)), seed)
        try:
            expected = output_of(model, *given[0], **given[1])
        except Exception:
            if seed == 0:
                raise
            continue  # not every model takes any numbers
        apart, allowed = apart_of(expected, output_of(pruned, *given[0], **given[1])), tolerance(expected, exact=exact)
        if apart > allowed:
            what = "on a random input " if seed else ""
            raise ConnectivityError(
                f"{what}the pruned network differs from the model by {apart:.1e} of the largest output, more than "
                f"{allowed:.0e}; perhaps the model is random in eval mode, or hooks change what its stacks compute."
                + ("" if exact else " See whether it is pruned without folding and merging.")
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
    return apart_of(output_of(model, x, *args, **kwargs), output_of(pruned, x, *args, **kwargs))


@torch.no_grad()
def output_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
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


def apart_of(expected: Any, found: Any) -> float:
    """The largest difference between the tensors of two outputs, relative to the largest entry of the expected one."""
    tensors = [[leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)] for y in (expected, found)]
    if not tensors[0]:
        raise ConnectivityError(f"the model returned a {type(expected).__name__} without tensors to compare.")
    if [(y.shape, y.dtype) for y in tensors[0]] != [(y.shape, y.dtype) for y in tensors[1]]:
        return math.inf
    return max(_ratio(*pair) for pair in zip(*tensors, strict=True))


def _ratio(expected: Tensor, found: Tensor) -> float:
    if expected.is_nested:
        return max(_ratio(*pair) for pair in zip(expected.unbind(), found.unbind(), strict=True))
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
