"""The kinds of branches that `mc.mixed` chooses among.

A kind is a function `fn(inputs, outputs, stride)` that returns a module from `inputs` channels to `outputs`, on every
stride-th position. Those without weights subsample, and pad channels with zeros, as the shortcuts of ResNet do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from maskconnect.errors import ConfigError
from maskconnect.models.blocks import ZeroPadding, conv

Kind = Callable[[int, int, int], nn.Module]

PROBE = 8
"""The side of the images by which a user's own kind is checked."""


def conv3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """What most networks are made of."""
    return conv(inputs, outputs, 3, stride)


def dilated3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """A 3x3 convolution that looks at 5x5 positions."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=2, dilation=2, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Every position by itself."""
    return conv(inputs, outputs, 1, stride)


def depthwise3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Every channel by itself."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=inputs, bias=False)


def separable5x5(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Every channel by itself, over 5x5 positions; then every position by itself."""
    depthwise = nn.Conv2d(inputs, inputs, 5, stride, padding=2, groups=inputs, bias=False)
    return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=conv(inputs, outputs, 1)))


def avgpool3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The mean of 3x3 positions."""
    return _widened(nn.AvgPool2d(3, stride, padding=1), inputs, outputs)


def maxpool3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The largest of 3x3 positions."""
    return _widened(nn.MaxPool2d(3, stride, padding=1), inputs, outputs)


def identity(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The input as it is."""
    return nn.Identity() if inputs == outputs and stride == 1 else ZeroPadding(inputs, outputs, stride)


def globalmean(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The mean of the image, at every position."""
    mean = GlobalMean()
    if inputs == outputs and stride == 1:
        return mean
    return nn.Sequential(OrderedDict(mean=mean, padding=ZeroPadding(inputs, outputs, stride)))


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        conv3x3,
        dilated3x3,
        conv1x1,
        depthwise3x3,
        separable5x5,
        avgpool3x3,
        maxpool3x3,
        identity,
        globalmean,
    )
}


class GlobalMean(nn.Module):
    """Every position becomes the mean over all."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as x."""
        return x.mean(dim=(2, 3), keepdim=True).expand_as(x)


def _widened(pool: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """A pool, and channels of zeros where there are to be more."""
    if inputs == outputs:
        return pool
    return nn.Sequential(OrderedDict(pool=pool, padding=ZeroPadding(inputs, outputs, 1)))


def branch(name: str, kind: Kind, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """A module of this kind, a batch norm and a ReLU: however unlike two branches are, their outputs are of one scale.

    Parts are called by what they are, so that the code of a pruned network can be read.
    """
    made = nn.Sequential(
        OrderedDict([(name, kind(inputs, outputs, stride)), ("norm", nn.BatchNorm2d(outputs)), ("relu", nn.ReLU())])
    )
    made.kind = name  # type: ignore[assignment]  # which drawings show
    return made


def check_own(name: str, kind: Kind, inputs: int, outputs: int, stride: int) -> None:
    """A user's own kind must make what a layer needs; it is tried on a few zeros."""
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            module = kind(inputs, outputs, stride)
            if not isinstance(module, nn.Module):
                raise ConfigError(f"own[{name!r}] returned a {type(module).__name__}; it must return an nn.Module.")
            found = module.eval()(torch.zeros(2, inputs, PROBE, PROBE))
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"own[{name!r}] failed with ({inputs}, {outputs}, {stride}): {reason}") from error
    wanted = (2, outputs, PROBE // stride, PROBE // stride)
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != wanted:
        raise ConfigError(
            f"own[{name!r}]({inputs}, {outputs}, {stride}) turns images of shape (2, {inputs}, {PROBE}, {PROBE}) into "
            f"{shape}; it must turn them into {wanted}."
        )
