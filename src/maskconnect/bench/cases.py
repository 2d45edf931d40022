"""Which networks are timed, and how far learning their wiring may be from a plain network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from torch import nn

from maskconnect.bench.plain import PlainResNet, PlainResNeXt
from maskconnect.models import ResNetSpec, ResNeXtSpec, build

CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with learned connectivity, and the plain one that it is compared with."""

    about: str
    spec: ResNetSpec | ResNeXtSpec
    plain: Callable[[], nn.Module]
    batches: tuple[int, ...] = (128, 32)
    bar: float  # how many times as long as a plain step a learning one may take
    aim: float

    @property
    def variants(self) -> tuple[str, ...]:
        """What is timed; see `steps.py`."""
        common = ("plain", "frozen", "learning", "blending", "reference")
        return common if isinstance(self.spec, ResNetSpec) else (*common, "lean")

    def network(self, connectivity: str) -> nn.Module:
        """Ours, with learned or random connectivity of the same fan-in."""
        return build(replace(self.spec, connectivity=connectivity))


def resnet_case(depth: int, fan_in: int, bar: float = inf, aim: float = inf) -> Case:
    """A ResNet of CIFAR."""
    blocks = [(depth - 2) // 6] * 3
    return Case(
        about=f"ResNet-{depth}, K={fan_in}",
        spec=ResNetSpec(depth=depth, num_classes=CLASSES, fan_in=fan_in),
        plain=lambda: PlainResNet("cifar", blocks, CLASSES),
        bar=bar,
        aim=aim,
    )


def resnext_case(
    width: int, cardinality: int, fan_in: int, bar: float = inf, aim: float = inf, batches: tuple[int, ...] = (128, 32)
) -> Case:
    """A ResNeXt of CIFAR, of 29 layers."""
    spec = ResNeXtSpec(depth=29, width=width, cardinality=cardinality, num_classes=CLASSES, fan_in=fan_in)
    return Case(
        about=f"ResNeXt {{29,{width},{cardinality}}}, K={fan_in}",
        spec=spec,
        plain=lambda: PlainResNeXt("cifar", [3, 3, 3], width, cardinality, CLASSES, "sum", spec.stem_width),
        batches=batches,
        bar=bar,
        aim=aim,
    )


CASES = {
    "resnet38": resnet_case(38, 10, 1.13, 1.05),
    "resnet74": resnet_case(74, 15, 1.25, 1.10),
    "resnet110": resnet_case(110, 20, 1.35, 1.15),
    "resnext29-8-8": resnext_case(8, 8, 4, 3.0, 2.0),
    "resnext29-64-8": resnext_case(64, 8, 4, 1.6, 1.2, (8,)),
}
