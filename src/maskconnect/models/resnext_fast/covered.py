"""Check that a ResNeXt is as `mc.resnext` built it, so that all its branches can run at once.

The reference path handles all other cases: hooks, other layers, parameters of another dtype or device, a compiler that
traces the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from maskconnect.core.layers import Layer
from maskconnect.models.branches import Branch, ResidualSum, SharedBatchNorm, SharedProjection
from maskconnect.models.groups import GroupedBatchNorm2d, groups_of

FORM = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, nn.BatchNorm2d)
"""The layers of a branch."""

POINTWISE = {"kernel_size": (1, 1), "padding": (0, 0)}
UNCHANGED = {"bias": None, "groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def covers(aggregation: ResidualSum, layers: Sequence[Layer], x: Any) -> bool:
    """Return whether all branches of all layers can run at once on x."""
    if not _is_plain(x) or x.dim() != 4 or not x.numel() or _is_observed(x):
        return False
    if type(aggregation) is not ResidualSum or aggregation.norms or not _is_untouched(aggregation):
        return False
    found = [list(layer.branches.values()) for layer in layers]
    if not all(_is_branch(branch) for members in found for branch in members):
        return False
    if not all(map(_is_projection, aggregation.shortcuts.values())):
        return False
    residuals = [[cast(Branch, branch).residual for branch in members] for members in found]
    shortcuts = [cast(SharedProjection, shortcut) for shortcut in aggregation.shortcuts.values()]
    if any(len({reader.fan_in for reader in layer.readers}) > 1 for layer in layers):
        return False
    norms = [part for one in residuals for residual in one for part in residual if isinstance(part, nn.BatchNorm2d)]
    norms += [shortcut.norm.norm for shortcut in shortcuts]
    if len(set(norms)) < len(norms):  # a shared norm updates its statistics several times
        return False
    if not all(_is_norm_like(norm, norms[0], x) for norm in norms):
        return False
    convs = all(_is_conv(shortcut.conv, POINTWISE, x) for shortcut in shortcuts)
    return convs and all(_are_alike(members, x) for members in residuals)


def _is_observed(x: Tensor) -> bool:
    kind = x.device.type
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _is_branch(branch: nn.Module) -> bool:
    if type(branch) is not Branch or type(branch.residual) is not nn.Sequential or len(branch.residual) != len(FORM):
        return False
    kinds = [nn.BatchNorm2d if type(part) is GroupedBatchNorm2d else type(part) for part in branch.residual]
    return kinds == list(FORM) and all(map(_is_untouched, (branch, branch.residual, *branch.residual)))


def _is_projection(shortcut: nn.Module) -> bool:
    if type(shortcut) is not SharedProjection or type(shortcut.norm) is not SharedBatchNorm:
        return False
    conv, norm = shortcut.conv, shortcut.norm.norm
    known = type(conv) is nn.Conv2d and type(norm) in (nn.BatchNorm2d, GroupedBatchNorm2d)
    return known and all(map(_is_untouched, (shortcut, shortcut.norm, conv, norm)))


def _are_alike(residuals: Sequence[nn.Sequential], x: Tensor) -> bool:
    """Return whether the convolutions of a module's branches all have the same shape."""
    for place, parts in enumerate(zip(*residuals, strict=True)):
        if isinstance(parts[0], nn.Conv2d):
            first = parts[0]
            form = {"stride": first.stride, "padding": first.padding} if place == 3 else POINTWISE | {"stride": (1, 1)}
            if not all(_is_conv(part, form, x) and part.weight.shape == first.weight.shape for part in parts):
                return False
    return True


def _is_conv(conv: nn.Module, form: dict[str, Any], x: Tensor) -> bool:
    if any(getattr(conv, name) != value for name, value in (form | UNCHANGED).items()):
        return False
    return _fits(cast(Tensor, conv.weight), x)


def _is_norm_like(norm: nn.BatchNorm2d, first: nn.BatchNorm2d, x: Tensor) -> bool:
    if norm.training is not first.training or norm.eps != first.eps or norm.momentum != first.momentum:
        return False
    if norm.momentum is None or not norm.track_running_stats or norm.num_batches_tracked is None:
        return False
    parts = norm.weight, norm.bias, norm.running_mean, norm.running_var
    same = groups_of(norm, len(x)) == groups_of(first, len(x))
    return same and all(part is not None and _fits(part, x) for part in parts)


def _fits(parameter: Tensor, x: Tensor) -> bool:
    return _is_plain(parameter) and parameter.dtype == x.dtype and parameter.device == x.device


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype in (torch.float32, torch.float64) and not x.is_nested


def _is_untouched(module: nn.Module) -> bool:
    """Return whether calling the module runs the code of its class and nothing else."""
    own = module.__dict__
    return "forward" not in own and not any(own[hooks] for hooks in HOOKS)
