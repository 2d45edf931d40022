"""The kinds of branches that `mc.mixed` chooses among.

A kind is a function `fn(inputs, outputs, stride)` that returns a module from `inputs` channels to `outputs`, on every
stride-th position. Kinds without weights subsample and pad channels with zeros, like the shortcuts of ResNet.
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
"""The side of the images with which a user-defined kind is checked."""


def conv3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 3x3 convolution."""
    return conv(inputs, outputs, 3, stride)


def dilated3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a dilated 3x3 convolution, which covers 5x5 positions."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=2, dilation=2, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 1x1 convolution."""
    return conv(inputs, outputs, 1, stride)


def depthwise3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 3x3 convolution of every channel by itself."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=inputs, bias=False)


def separable5x5(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 5x5 convolution of every channel by itself, and then a 1x1 convolution."""
    depthwise = nn.Conv2d(inputs, inputs, 5, stride, padding=2, groups=inputs, bias=False)
    return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=conv(inputs, outputs, 1)))


def avgpool3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return average pooling over 3x3 positions."""
    return _widened(nn.AvgPool2d(3, stride, padding=1), inputs, outputs)


def maxpool3x3(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return max pooling over 3x3 positions."""
    return _widened(nn.MaxPool2d(3, stride, padding=1), inputs, outputs)


def identity(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return the identity."""
    return nn.Identity() if inputs == outputs and stride == 1 else ZeroPadding(inputs, outputs, stride)


def globalmean(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a module that puts the mean of the image at every position."""
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
    """Replaces every position with the mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the means, in the shape of x."""
        return x.mean(dim=(2, 3), keepdim=True).expand_as(x)


def _widened(pool: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Return the pool, followed by padding with channels of zeros if there are more outputs than inputs."""
    if inputs == outputs:
        return pool
    return nn.Sequential(OrderedDict(pool=pool, padding=ZeroPadding(inputs, outputs, 1)))


def branch(name: str, kind: Kind, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return a module of this kind, a batch norm and a ReLU, so that the outputs of all branches have the same scale.

    Parts are named after what they are, so that the code of a pruned network is readable.
    """
    made = nn.Sequential(
        OrderedDict([(name, kind(inputs, outputs, stride)), ("norm", nn.BatchNorm2d(outputs)), ("relu", nn.ReLU())])
    )
    made.kind = name  # type: ignore[assignment]  # drawings show it
    return made


def check_own(name: str, kind: Kind, inputs: int, outputs: int, stride: int) -> None:
    """Check a user-defined kind on a few zeros: it must return a module with the right output shape."""
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
