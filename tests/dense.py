"""A small DenseNet, written as timm and torchvision write theirs, and the same with masks by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation inside, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class Layer(nn.Module):
    """Norm, activation, 1x1 convolution, and again with 3x3; checkpointed up to the first convolution if asked for."""

    def __init__(self, inputs: int, growth: int, kind: str = "torchvision", drop: float = 0.0) -> None:
        super().__init__()
        norm, act = (NormAct, nn.Identity) if kind == "timm" else (nn.BatchNorm2d, nn.ReLU)
        self.norm1, self.relu1 = norm(inputs), act()
        self.conv1 = nn.Conv2d(inputs, 2 * growth, 1, bias=kind == "timm")
        self.norm2, self.relu2 = norm(2 * growth), act()
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)
        self.drop, self.checkpointing = drop, ""

    def bottleneck(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        if self.checkpointing:
            h = checkpoint(self.bottleneck, *features, use_reentrant=self.checkpointing == "reentrant")
        else:
            h = self.bottleneck(*features)
        return F.dropout(self.conv2(self.relu2(self.norm2(h))), self.drop, self.training)


class Block(nn.ModuleDict):
    def __init__(self, count: int, inputs: int, growth: int, kind: str = "torchvision", drop: float = 0.0) -> None:
        super().__init__()
        for k in range(count):
            self[f"denselayer{k + 1}"] = Layer(inputs + k * growth, growth, kind, drop)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Two dense blocks of 4 and 5 layers."""

    def __init__(self, kind: str = "torchvision", drop: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 6, 3, padding=1))
        self.features.add_module("denseblock1", Block(4, 6, 3, kind, drop))
        transition = nn.Sequential(nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 8, 1), nn.AvgPool2d(2))
        self.features.add_module("transition1", transition)
        self.features.add_module("denseblock2", Block(5, 8, 4, kind, drop))
        self.features.add_module("norm5", nn.BatchNorm2d(28))
        self.classifier = nn.Linear(28, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.features(x)).mean((2, 3)))


def block_by_hand(layers: Sequence[nn.Module], masks: Sequence[Tensor], x: Tensor) -> Tensor:
    """Every candidate of every layer times its entry of the mask, after norm and activation; x has an entry too."""
    features = [x]
    for layer, mask in zip(layers, masks, strict=True):
        z = layer.relu1(layer.norm1(torch.cat(features, 1)))
        parts = z.split([y.shape[1] for y in features], dim=1)
        h = layer.conv1(torch.cat([m * part for m, part in zip(mask, parts, strict=True)], dim=1))
        features.append(layer.conv2(layer.relu2(layer.norm2(h))))
    return torch.cat(features, 1)


def rows_of(wiring: Sequence[Sequence[int]]) -> list[Tensor]:
    """The masks of the layers of a block, for `block_by_hand`; the first row of a wiring is its input's."""
    return [
        torch.tensor([float(k in row) for k in range(j)], dtype=torch.float64).requires_grad_()
        for j, row in enumerate(wiring)
        if j
    ]
