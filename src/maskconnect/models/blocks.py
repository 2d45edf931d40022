"""The parts of the paper's networks: stems, residual blocks, the classifier.

Every convolution has no bias and is followed by a batch norm. If a block subsamples, its 3x3 convolution does it, as in
the code of the ResNeXt paper, and as in the ResNet-50 with 76.15 % that our paper starts from.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.align import subsampled
from maskconnect.core.residual import Residual

if TYPE_CHECKING:
    from maskconnect.models.spec import Spec


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, branches: int = 1) -> nn.Conv2d:
    """Return a convolution with the initialization of He et al. (fan-out).

    Each of several parallel `branches` starts like its part of the one wide convolution in plain ResNeXt.
    """
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (kernel**2 * outputs * branches)))
    return layer


def cifar_stem(inputs: int, width: int) -> nn.Sequential:
    """Return the stem for images of 32 px: a 3x3 convolution."""
    return nn.Sequential(conv(inputs, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def mini_stem(inputs: int, width: int) -> nn.Sequential:
    """Return the stem for images of 64 px (table 7): 3x3 and a max pool, which halves them."""
    return cifar_stem(inputs, width).append(nn.MaxPool2d(3, stride=2, padding=1))


def imagenet_stem(inputs: int, width: int) -> nn.Sequential:
    """Return the stem for images of 224 px: 7x7 with stride 2 and a max pool, to a quarter of their size."""
    layers = conv(inputs, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.MaxPool2d(3, stride=2, padding=1))


STEMS = {"cifar": cifar_stem, "mini": mini_stem, "imagenet": imagenet_stem}


class Block(nn.Module):
    """A whole residual block: ReLU(F(x) + S(x))."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)  # a sum is a new tensor


class ResidualBlock(Residual):
    """The same block as a pair, F(x) and S(x). Its parts round odd sizes up, which `mc.prune` relies on."""


class ZeroPadding(nn.Module):
    """The parameter-free shortcut: every stride-th position, and channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.zeros, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        """Subsample x, and add channels of zeros."""
        return subsampled(x, (self.stride, self.stride), self.zeros)


def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return the shortcut with parameters: a 1x1 convolution and a batch norm."""
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def basic(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return two 3x3 convolutions."""
    return nn.Sequential(
        *(conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
        *(conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)),
    )


def bottleneck(inputs: int, width: int, outputs: int, stride: int, *, branches: int = 1) -> nn.Sequential:
    """Return 1x1, 3x3, 1x1: a block of a deep ResNet, or one of the parallel branches of a ResNeXt module."""
    return nn.Sequential(
        *(conv(inputs, width, 1, branches=branches), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(conv(width, width, 3, stride, branches=branches), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(conv(width, outputs, 1), nn.BatchNorm2d(outputs)),
    )


def preactivation(layers: nn.Sequential) -> nn.Sequential:
    """Reorder the layers of a block: batch norm, ReLU, convolution."""
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    return nn.Sequential(
        *(part for conv in convs for part in (nn.BatchNorm2d(conv.in_channels), nn.ReLU(inplace=True), conv))
    )


class Classifier(nn.Module):
    """Stem, stack, global average pooling, linear classifier; `spec` describes it.

    `preactivated` adds a batch norm and a ReLU after the stack, whose blocks have theirs before each convolution.
    """

    def __init__(
        self,
        spec: Spec,
        stem: nn.Module,
        stack: nn.Module,
        features: int,
        num_classes: int,
        *,
        preactivated: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.stem, self.stack = spec, stem, stack
        self.last = nn.Sequential(nn.BatchNorm2d(features), nn.ReLU(inplace=True)) if preactivated else nn.Identity()
        self.classifier = nn.Linear(features, num_classes)

    def describe(self) -> dict[str, Any]:
        """Return the spec as plain data."""
        return self.spec.describe()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes, for images N x channels x H x W."""
        scores: Tensor = self.classifier(self.last(self.stack(self.stem(x))).mean(dim=(2, 3)))
        return scores
