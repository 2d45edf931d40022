"""Plain ResNet and ResNeXt in PyTorch alone: the baselines of all comparisons.

They are as fast as eager PyTorch allows: sums and ReLUs overwrite outputs of batch norms, which no backward pass needs,
and shortcuts are subsampled by pooling single pixels, whose gradient keeps the memory format (that of a slice does
not).

ResNeXt has grouped convolutions, as published. With `norm="branch"` its last 1x1 convolution is grouped too, and has a
batch norm per branch before the branches are summed.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def stem(kind: str, inputs: int, width: int) -> list[nn.Module]:
    """Return the convolution and batch norm of the stem; `pooled` does the pooling."""
    kernel, stride = (7, 2) if kind == "imagenet" else (3, 1)
    return [nn.Conv2d(inputs, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width)]


def pooled(kind: str, x: Tensor) -> Tensor:
    """Max-pool the output of the stem, except for images of 32 px."""
    return x if kind == "cifar" else F.max_pool2d(x, 3, 2, 1)


class PlainBlock(nn.Module):
    """A block of ResNet: two 3x3 convolutions, or a bottleneck of three."""

    def __init__(self, inputs: int, outputs: int, stride: int, deep: bool, project: bool) -> None:
        super().__init__()
        if deep:
            shapes = [
                (inputs, outputs // 4, 1, 1),
                (outputs // 4, outputs // 4, 3, stride),
                (outputs // 4, outputs, 1, 1),
            ]
        else:
            shapes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shapes)
        self.project = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if project else None
        self.project_norm = nn.BatchNorm2d(outputs) if project else None
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(F.relu_(y) if number else y))
        if self.project is not None and self.project_norm is not None:
            x = self.project_norm(self.project(x))
        elif self.stride > 1 or self.missing:
            x = F.pad(F.avg_pool2d(x, 1, self.stride), (0, 0, 0, 0, 0, self.missing))
        y += x
        return F.relu_(y)


class PlainResNet(nn.Module):
    """ResNet; `deep` for bottleneck blocks."""

    def __init__(self, kind: str, stages: list[int], num_classes: int, deep: bool = False) -> None:
        super().__init__()
        self.kind, width, inputs = kind, *((64, 64) if kind == "imagenet" else (16, 16))
        self.stem = nn.ModuleList(stem(kind, 3, width))
        self.blocks = nn.ModuleList()
        for stage, count in enumerate(stages):
            outputs = width * 2**stage * (4 if deep else 1)
            for block in range(count):
                stride = 2 if stage and not block else 1
                self.blocks.append(PlainBlock(inputs, outputs, stride, deep, kind == "imagenet" and inputs != outputs))
                inputs = outputs
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes."""
        x = pooled(self.kind, F.relu_(self.stem[1](self.stem[0](x))))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class PlainModule(nn.Module):
    """A module of ResNeXt."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int, norm: str) -> None:
        super().__init__()
        wide, last = groups * width, groups if norm == "branch" else 1
        self.reduce = nn.Conv2d(inputs, wide, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(wide)
        self.grouped = nn.Conv2d(wide, wide, 3, stride, 1, groups=groups, bias=False)
        self.grouped_norm = nn.BatchNorm2d(wide)
        self.expand = nn.Conv2d(wide, last * outputs, 1, groups=last, bias=False)
        self.expand_norm = nn.BatchNorm2d(last * outputs)
        self.branches = last
        self.project = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None
        self.project_norm = nn.BatchNorm2d(outputs) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the module."""
        y = F.relu_(self.reduce_norm(self.reduce(x)))
        y = F.relu_(self.grouped_norm(self.grouped(y)))
        y = self.expand_norm(self.expand(y))
        if self.branches > 1:
            y = y.unflatten(1, (self.branches, -1)).sum(1)
        if self.project is not None and self.project_norm is not None:
            x = self.project_norm(self.project(x))
        y += x
        return F.relu_(y)


class PlainResNeXt(nn.Module):
    """ResNeXt, with one batch norm after the sum of branches, or one per branch."""

    def __init__(
        self, kind: str, stages: list[int], width: int, groups: int, num_classes: int, norm: str, stem_width: int = 16
    ) -> None:
        super().__init__()
        self.kind, inputs = kind, stem_width
        self.stem = nn.ModuleList(stem(kind, 3, stem_width))
        self.blocks = nn.ModuleList()
        for stage, count in enumerate(stages):
            outputs = 4 * stem_width * 2**stage
            for block in range(count):
                stride = 2 if stage and not block else 1
                self.blocks.append(PlainModule(inputs, width * 2**stage, outputs, stride, groups, norm))
                inputs = outputs
        self.fc = nn.Linear(inputs, num_classes)

    forward = PlainResNet.forward
