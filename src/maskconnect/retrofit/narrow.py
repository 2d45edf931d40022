"""A layer of a dense block with the channels of some of its sources only, or with a weight per source.

A layer reads the concatenation of its sources through `norm1`, an activation and `conv1`. The norm and the activation
treat every channel by itself, and the convolution adds channels up, so both norm and convolution can be cut along the
channels of the sources. The layer's own `forward` stays what is run, on copies that share all its other parts.

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
    """The batch norm that a layer of a dense block begins with."""
    return cast(_BatchNorm, layer.norm1)


def conv_of(layer: nn.Module) -> _ConvNd:
    """The convolution that reads all sources of a layer."""
    return cast(_ConvNd, layer.conv1)


def growth_of(layer: nn.Module) -> int:
    """The number of channels that a layer returns."""
    return cast(_ConvNd, layer.conv2).out_channels


def narrowed(layer: nn.Module, widths: Sequence[int], kept: Sequence[int]) -> nn.Module:
    """The layer for those of its sources that are `kept`; `widths` are the channels of all its sources.

    Its tensors are parts of the layer's own: gradients reach those, and are zero for the sources that are left out.
    """
    norm, conv = norm_of(layer), conv_of(layer)
    channels = sum(widths[k] for k in kept)

    def cut(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The tensors that have an entry per channel, cut; all others, such as a number of batches, as they are."""
        return {name: y if y is None or not y.dim() else _cut(y, widths, kept, 0) for name, y in tensors.items()}

    small_norm = twin(norm, parameters=cut(norm._parameters), buffers=cut(norm._buffers), num_features=channels)
    weight = _cut(conv.weight, widths, kept, 1)
    small_conv = twin(conv, parameters={**conv._parameters, "weight": weight}, in_channels=channels)
    return twin(layer, modules={**layer._modules, "norm1": small_norm, "conv1": small_conv})


def weighted(layer: nn.Module, widths: Sequence[int], mask_S: Tensor) -> nn.Module:
    """The layer with what `conv1` reads of each source multiplied by that source's entry of the mask.

    The entry multiplies the columns of the weight, which is the same and costs nothing per pixel. In half precision
    too it is multiplied in float32, so that its gradient is added up there.
    """
    conv = conv_of(layer)
    times_S = torch.tensor(widths, device=mask_S.device)
    mask_C = mask_S.repeat_interleave(times_S, output_size=sum(widths))
    weight = conv.weight * mask_C.reshape(-1, *[1] * (conv.weight.dim() - 2))
    masked = twin(conv, parameters={**conv._parameters, "weight": weight.to(conv.weight.dtype)})
    return twin(layer, modules={**layer._modules, "conv1": masked})


@torch.no_grad()
def keep_statistics_(layer: nn.Module, small: nn.Module, widths: Sequence[int], kept: Sequence[int]) -> None:
    """Write the running statistics that a narrowed layer moved in train mode back to the layer's own."""
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
    """A module of the same class that shares everything with `module` but for what is given here.

    So torch makes the replicas of `nn.DataParallel`. Unlike `torch.func.functional_call` it also serves a layer that
    checkpoints its activations: the backward pass runs the twin again, not the module.
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
