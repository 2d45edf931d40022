"""Measure how much the outputs of two networks differ, and check that it is within rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from maskconnect.core.targets import cloned
from maskconnect.errors import ConfigError, ConnectivityError, MaskConnectError, cut

RANDOM_INPUTS = 2
"""The number of random inputs on which a pruned network is compared, in addition to the example."""


def check(model: nn.Module, pruned: nn.Module, args: Any, kwargs: Mapping[str, Any], *, exact: bool) -> float:
    """Return the largest difference of outputs on the given input and on random ones; raise an error if too large."""
    largest = 0.0
    for seed in range(1 + RANDOM_INPUTS):
        given = (args, dict(kwargs)) if seed == 0 else _random_like((args, dict(kwargs)), seed)
        try:
            expected = output_of(model, *given[0], **given[1])
        except Exception:
            if seed == 0:
                raise
            continue  # some models do not accept arbitrary numbers
        gap, allowed = (
            relative_difference(expected, output_of(pruned, *given[0], **given[1])),
            tolerance(expected, exact=exact),
        )
        if gap > allowed:
            what = "on a random input " if seed else ""
            raise ConnectivityError(
                f"{what}the pruned network differs from the model by {gap:.1e} of the largest output, more than "
                f"{allowed:.0e}; perhaps the model is random in eval mode, or hooks change what its stacks compute."
                + ("" if exact else " Try pruning with fold=False and merge=False.")
            )
        largest = max(largest, gap)
    return largest


def _random_like(given: Any, seed: int) -> Any:
    """Return normal random tensors with the mean and deviation of the given ones; other values stay the same."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(y: Tensor) -> Tensor:
        if not y.is_floating_point() or y.is_nested or not y.isfinite().all() or not y.numel():
            return y
        noise = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
        spread = y.double().std(correction=0)
        return (y.double().mean() + noise * torch.where(spread > 0, spread, 1)).to(y.dtype)

    return tree_map_only(Tensor, drawn, given)


def difference(model: nn.Module, pruned: nn.Module, x: Any, *args: Any, **kwargs: Any) -> float:
    """Return the largest difference of the outputs of two models in eval mode, relative to the largest output."""
    return relative_difference(output_of(model, x, *args, **kwargs), output_of(pruned, x, *args, **kwargs))


@torch.no_grad()
def output_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a model in eval mode, without changing its modes, the arguments or random states."""
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


def output_of_example(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return `output_of`; if the model rejects the example, the error names the model's own error."""
    try:
        return output_of(model, *args, **kwargs)
    except MaskConnectError:
        raise
    except Exception as error:  # networks raise many kinds of errors
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ConfigError(
            f"the model rejects the example ({cut(reason)}); pass an input that the model accepts."
        ) from error


def relative_difference(expected: Any, found: Any) -> float:
    """Return the largest difference between the tensors of two outputs, relative to the largest expected entry."""
    tensors = [[leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)] for y in (expected, found)]
    if not tensors[0]:
        raise ConnectivityError(
            f"the model returned a {type(expected).__name__} without tensors to compare; return tensors."
        )
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
    """Return the allowed difference: 1e-12 in float64, 1e-5 in float32, the machine epsilon in half precision.

    Without `exact` it is ten times larger, because folding and merging change weights and the order of sums.
    """
    kinds = {leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    least = max((1e-12 if kind == torch.float64 else max(1e-5, torch.finfo(kind).eps) for kind in kinds), default=1e-5)
    return least if exact else 10 * least
