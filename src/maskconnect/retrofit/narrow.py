"""A layer of a dense block with the channels of some of its sources, or with a weight per source.

A layer reads the concatenation of its sources through `norm1`, an activation and `conv1`. Norm and activation work per
channel, and the convolution is a sum over channels, so norm and convolution can be cut along the channels of the
sources. The `forward` of the layer still runs, on copies that share all other parts.

Shape letters: S sources of a layer, C their channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Kind = TypeVar("Kind", bound=nn.Module)
STATISTICS = ("running_mean", "running_var")


def norm_of(layer: nn.Module) -> _BatchNorm:
    """Return the first batch norm of a layer of a dense block."""
    return cast(_BatchNorm, layer.norm1)


def conv_of(layer: nn.Module) -> _ConvNd:
    """Return the convolution that reads all sources of a layer."""
    return cast(_ConvNd, layer.conv1)


def growth_of(layer: nn.Module) -> int:
    """Return the number of channels of the output of a layer."""
    return cast(_ConvNd, layer.conv2).out_channels


def narrowed(layer: nn.Module, widths: Sequence[int], kept: Sequence[int]) -> nn.Module:
    """Return the layer for the sources in `kept`; `widths` are the numbers of channels of all its sources.

    Its tensors are parts of the original tensors, which get the gradients; these are zero for the other sources.
    """
    norm, conv = norm_of(layer), conv_of(layer)
    channels = sum(widths[k] for k in kept)

    def cut(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Cut the tensors that have an entry per channel; others, such as a number of batches, stay the same."""
        return {name: y if y is None or not y.dim() else _cut(y, widths, kept, 0) for name, y in tensors.items()}

    small_norm = twin(norm, parameters=cut(norm._parameters), buffers=cut(norm._buffers), num_features=channels)
    weight = _cut(conv.weight, widths, kept, 1)
    small_conv = twin(conv, parameters={**conv._parameters, "weight": weight}, in_channels=channels)
    return twin(layer, modules={**layer._modules, "norm1": small_norm, "conv1": small_conv})


def weighted(layer: nn.Module, widths: Sequence[int], mask_S: Tensor) -> nn.Module:
    """Return the layer with each source multiplied by its mask entry before `conv1`.

    The entry multiplies the columns of the weight, which has the same effect and costs nothing per pixel. This happens
    in float32 even for half precision, so that the mask gradient is summed in float32.
    """
    conv = conv_of(layer)
    times_S = torch.tensor(widths, device=mask_S.device)
    mask_C = mask_S.repeat_interleave(times_S, output_size=sum(widths))
    weight = conv.weight * mask_C.reshape(-1, *[1] * (conv.weight.dim() - 2))
    masked = twin(conv, parameters={**conv._parameters, "weight": weight.to(conv.weight.dtype)})
    return twin(layer, modules={**layer._modules, "conv1": masked})


@torch.no_grad()
def keep_statistics_(layer: nn.Module, small: nn.Module, widths: Sequence[int], kept: Sequence[int]) -> None:
    """Copy the running statistics that a narrowed layer updated in train mode back to the layer."""
    norm, own = norm_of(small), norm_of(layer)
    if not norm.training or norm.running_mean is None:
        return
    for name in STATISTICS:
        places = torch.split(getattr(own, name), list(widths))
        found = torch.split(getattr(norm, name), [widths[k] for k in kept])
        for k, values in zip(kept, found, strict=True):
            places[k].copy_(values)


def twin(
    module: Kind,
    *,
    parameters: Mapping[str, Tensor | None] | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, nn.Module | None] | None = None,
    **attributes: Any,
) -> Kind:
    """Return a module of the same class that shares everything with `module`, except for what is given here.

    torch makes the replicas of `nn.DataParallel` in this way. Unlike `torch.func.functional_call`, it also works for a
    layer with activation checkpointing: the backward pass repeats the twin, not the module.
    """
    given = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
    made = module.__new__(type(module))
    made.__dict__ = {**module.__dict__, **attributes}
    for name, found in given.items():
        made.__dict__[name] = dict(module.__dict__[name] if found is None else found)
    return made


def _cut(y: Tensor, widths: Sequence[int], kept: Sequence[int], dim: int) -> Tensor:
    parts = torch.split(y, list(widths), dim)
    return torch.cat([parts[k] for k in kept], dim)
