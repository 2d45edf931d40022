"""Whether a ResNeXt is as `mc.resnext` built it, so that all its branches can run at once.

A hook, another kind of layer, parameters of another type or on another device, a compiler that looks on: whatever it
is, the readable path does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from maskconnect.core.layerwise import Layer
from maskconnect.models.branches import Branch, SharedProjection
from maskconnect.models.groups import GroupedBatchNorm2d, groups_of

POINTWISE = {"kernel_size": (1, 1), "padding": (0, 0)}
UNCHANGED = {"bias": None, "groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def covers(layers: Sequence[Layer], shortcuts: Iterable[nn.Module], x: Any) -> bool:
    """Whether all branches of all layers can run at once, on x."""
    if not _is_plain(x) or x.dim() != 4 or not x.numel() or _somebody_looks_on(x):
        return False
    branches = [list(layer.branches.values()) for layer in layers]
    if not _is_branch(branches[0][0]) or not isinstance(
        norm := cast(Branch, branches[0][0]).residual[1], nn.BatchNorm2d
    ):
        return False
    training, groups = norm.training, groups_of(norm, len(x))
    for layer, members in zip(layers, branches, strict=True):
        if len({reader.fan_in for reader in layer.readers}) > 1 or not all(_is_branch(branch) for branch in members):
            return False
        if not _are_alike([cast(Branch, branch).residual for branch in members], training, groups, x):
            return False
    return all(_is_projection(shortcut, training, groups, x) for shortcut in shortcuts)


def _somebody_looks_on(x: Tensor) -> bool:
    kind = x.device.type
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _is_branch(branch: nn.Module) -> bool:
    return type(branch) is Branch and _is_untouched(branch) and type(branch.residual) is nn.Sequential


def _are_alike(residuals: Sequence[nn.Sequential], training: bool, groups: int, x: Tensor) -> bool:
    """Whether the branches of a module are three convolutions with batch norms, and all of the same shape."""
    if any(len(residual) != 8 for residual in residuals) or not all(map(_is_untouched, residuals)):
        return False
    for place, parts in enumerate(zip(*residuals, strict=True)):
        first = parts[0]
        if not all(map(_is_untouched, parts)):
            return False
        if place in (0, 3, 6):
            form = {"stride": first.stride, "padding": first.padding} if place == 3 else POINTWISE | {"stride": (1, 1)}
            if not all(_is_conv(part, form, x) and part.weight.shape == first.weight.shape for part in parts):
                return False
        elif place in (1, 4, 7):
            if not all(_is_norm(part, cast(nn.BatchNorm2d, first), training, groups, x) for part in parts):
                return False
        elif not all(type(part) is nn.ReLU for part in parts):
            return False
    return True


def _is_projection(shortcut: nn.Module, training: bool, groups: int, x: Tensor) -> bool:
    if type(shortcut) is not SharedProjection or not all(map(_is_untouched, (shortcut, shortcut.norm))):
        return False
    conv, norm = shortcut.conv, shortcut.norm.norm
    parts_are_ours = _is_conv(conv, POINTWISE, x) and _is_norm(norm, norm, training, groups, x)
    return parts_are_ours and all(map(_is_untouched, (conv, norm)))


def _is_conv(conv: nn.Module, form: dict[str, Any], x: Tensor) -> bool:
    if type(conv) is not nn.Conv2d or any(getattr(conv, name) != value for name, value in form.items()):
        return False
    return all(getattr(conv, name) == value for name, value in UNCHANGED.items()) and _fits(conv.weight, x)


def _is_norm(norm: nn.Module, first: nn.BatchNorm2d, training: bool, groups: int, x: Tensor) -> bool:
    if type(norm) not in (nn.BatchNorm2d, GroupedBatchNorm2d) or norm.training is not training:
        return False
    assert isinstance(norm, nn.BatchNorm2d)
    same = norm.eps == first.eps and norm.momentum == first.momentum and norm.num_features == first.num_features
    same = same and groups_of(norm, len(x)) == groups
    parts = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return same and norm.momentum is not None and all(part is not None and _fits(part, x) for part in parts)


def _fits(parameter: Tensor, x: Tensor) -> bool:
    return _is_plain(parameter) and parameter.dtype == x.dtype and parameter.device == x.device


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype in (torch.float32, torch.float64) and not x.is_nested


def _is_untouched(module: nn.Module) -> bool:
    """Whether calling the module does what its class says."""
    own = module.__dict__
    return "forward" not in own and not any(own[hooks] for hooks in HOOKS)
