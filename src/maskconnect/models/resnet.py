"""ResNet with learned connectivity (sections 3.4 and 4.1; the ImageNet network of section 4.2).

    stem      depth            blocks of a stage    widths                    shortcuts
    cifar     6n+2             n, n, n              16, 32, 64                zero padding
    mini      the same, after a max pool
    imagenet  18, 34 (basic)   3, 4, 6, 3 for 34    64, 128, 256, 512         projection where the shape changes
              50, 101, 152     3, 4, 6, 3 for 50    256, 512, 1024, 2048      (bottlenecks a quarter as wide)

A block may read every earlier block of any stage; zero padding matches the shapes of sources. How they are joined:

    mean       x_j = (1/K_j) sum_k m_jk ReLU( F_k(x_k) + S(x_k) )                   prev is plain ResNet
    residual   x_j = ReLU( sum_k m_jk F_k(x_k) + (1/K_j) sum_k m_jk S(x_k) )        prev is plain ResNet
    stream     x_j = stem + sum_k m_jk F_k(x_k), activations first in F             full is plain pre-activation ResNet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn

from maskconnect.core.residual import mean_fan_in_of_readers
from maskconnect.core.stack import MaskedStack
from maskconnect.models.blocks import (
    STEMS,
    Block,
    Classifier,
    ResidualBlock,
    ZeroPadding,
    basic,
    bottleneck,
    preactivation,
    projection,
)
from maskconnect.models.spec import DepthSpec

BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(DepthSpec):
    """The fields of a ResNet."""

    FAMILY: ClassVar[str] = "resnet"
    PLAIN: ClassVar[str] = "prev"
    LAYERED: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The name of this network."""
        return f"ResNet-{self.depth}"

    @property
    def plain_words(self) -> str:
        """A description of the network with `PLAIN` connectivity."""
        return "as in plain ResNet"

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return self.modules_per_stage(2, BASIC | BOTTLENECK)

    @property
    def modules(self) -> tuple[int, ...]:
        """One block per layer."""
        return (1,) * sum(self.stages)


def build_resnet(spec: ResNetSpec) -> Classifier:
    """Build the network that `spec` describes."""
    imagenet = spec.stem == "imagenet"
    width = 64 if imagenet else 16
    expansion = 4 if imagenet and spec.depth in BOTTLENECK else 1
    stem, blocks, inputs = STEMS[spec.stem](spec.in_channels, width), list[nn.Module](), width
    for stage, count in enumerate(spec.stages):
        outputs = expansion * width * 2**stage
        for block in range(count):
            stride = 2 if stage and block == 0 else 1
            layers = (
                basic(inputs, outputs, stride) if expansion == 1 else bottleneck(inputs, outputs // 4, outputs, stride)
            )
            if spec.aggregation == "stream":
                blocks.append(preactivation(layers))
            else:
                shortcut: nn.Module = nn.Identity()
                if inputs != outputs:
                    shortcut = projection(inputs, outputs, stride) if imagenet else ZeroPadding(inputs, outputs, stride)
                kind = ResidualBlock if spec.aggregation == "residual" else Block
                blocks.append(kind(layers, shortcut))
            inputs = outputs
    stack = spec.stack(blocks)
    if spec.aggregation == "residual":
        start_scales_(stack)
    return Classifier(spec, stem, stack, inputs, spec.num_classes, preactivated=spec.aggregation == "stream")


def start_scales_(stack: MaskedStack) -> None:
    """Start the last batch norm of a block at 1/K, because K residuals are summed (D1).

    K is the mean over the targets that may read the block; it is 1 for the last block, which none may read.
    """
    readers = mean_fan_in_of_readers(stack.masks.candidates, stack.masks.fan_in.tolist())
    for block, fan_in in zip(stack.flat(), readers, strict=True):
        norm = cast(nn.BatchNorm2d, cast(nn.Sequential, block.residual)[-1])
        nn.init.constant_(norm.weight, 1 / fan_in)


def resnet(
    depth: int,
    num_classes: int,
    fan_in: int | None = None,
    *,
    connectivity: str | Sequence[Any] = "learned",
    aggregation: str = "mean",
    stem: str = "cifar",
    in_channels: int = 3,
    mask_init: str | float = "uniform",
    use_all: bool = False,
    seed: int = 0,
) -> Classifier:
    """Build a ResNet whose blocks learn which K earlier blocks to read: `mc.resnet(38, 100, fan_in=10)`.

    Args:
        depth: the number of layers: 6n+2 (38, 74, 110 in the paper), or 18, 34, 50, 101, 152 with stem="imagenet".
        num_classes: the number of classes.
        fan_in: K, the number of blocks that a block reads. Not needed if `connectivity` determines it.
        connectivity: "learned", "prev" (plain ResNet), "random", "full", or an explicit wiring.
        aggregation: how the blocks that a block reads are joined (D1): "mean" of whole blocks; "residual", residuals
            summed and shortcuts averaged, as in `mc.resnext`; "stream", the stem plus residuals, with activations
            first; "scaled", a learned factor per connection, initially 1/K; or "sum", as the paper writes it, whose
            activations explode.
        stem: "cifar" (3x3), "mini" (3x3 and a max pool) or "imagenet" (7x7 and a max pool, bottleneck blocks).
        in_channels: the channels of the images.
        mask_init, use_all: the initial real masks, and whether every block must be read, as in `mc.MaskedStack`.
        seed: the seed of draws and of random connectivity. Weights come from torch's global generator.
    """
    return build_resnet(
        ResNetSpec(
            depth=depth,
            num_classes=num_classes,
            fan_in=fan_in,
            connectivity=connectivity,
            aggregation=aggregation,
            stem=stem,
            in_channels=in_channels,
            mask_init=mask_init,
            use_all=use_all,
            seed=seed,
        )
    )
