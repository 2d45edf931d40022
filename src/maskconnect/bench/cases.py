"""The networks that are timed, and limits for the cost of learning their wiring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from torch import nn

from maskconnect.bench.forms import OF_CONVOLUTIONS, OF_SEQUENCES, Form
from maskconnect.bench.plain import PlainResNet, PlainResNeXt
from maskconnect.bench.plain_transformer import PlainTransformer
from maskconnect.models import ResNetSpec, ResNeXtSpec, build
from maskconnect.retrofit.rewire import rewire

CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for a learning step, as multiples of a plain one."""

    time: Mapping[int, float] = field(default_factory=dict)  # by batch size
    memory: float = inf
    operations: float = inf

    def at(self, batch: int) -> dict[str, float | None]:
        """Return the limits of one batch size as plain data; None if time has no limit."""
        return {"time": self.time.get(batch), "memory": self.memory, "operations": self.operations}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with learned connectivity, and the plain one that it is compared with."""

    about: str
    network: Callable[[str], nn.Module]  # takes the connectivity: "learned", or "random" with the same fan-in
    plain: Callable[[], nn.Module]
    forms: tuple[Form, ...] = OF_CONVOLUTIONS  # each network is timed in the fastest of these
    batches: tuple[int, ...] = (128, 32)
    images: int | None = None  # masks learn from about this many per batch; None for all
    has_lean: bool = False  # whether it can recompute wide tensors in the backward pass
    bar: Limits = Limits()  # enforced by tests
    aim: Limits = Limits()  # the goal

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that are timed; see `steps.py`."""
        common = ("plain", "frozen", "learning", "blending", "reference")
        return (*common, "lean") if self.has_lean else common


def resnet_case(depth: int, fan_in: int, **options: Any) -> Case:
    """Return the case of a CIFAR ResNet."""
    blocks = [(depth - 2) // 6] * 3
    spec = ResNetSpec(depth=depth, num_classes=CLASSES, fan_in=fan_in)
    return Case(
        about=f"ResNet-{depth}, K={fan_in}",
        network=lambda connectivity: build(replace(spec, connectivity=connectivity)),
        plain=lambda: PlainResNet("cifar", blocks, CLASSES),
        **options,
    )


def resnext_case(width: int, cardinality: int, fan_in: int, **options: Any) -> Case:
    """Return the case of a CIFAR ResNeXt with 29 layers."""
    spec = ResNeXtSpec(depth=29, width=width, cardinality=cardinality, num_classes=CLASSES, fan_in=fan_in)
    return Case(
        about=f"ResNeXt {{29,{width},{cardinality}}}, K={fan_in}",
        network=lambda connectivity: build(replace(spec, connectivity=connectivity)),
        plain=lambda: PlainResNeXt("cifar", [3, 3, 3], width, cardinality, CLASSES, "sum", spec.stem_width),
        has_lean=True,
        **options,
    )


def transformer_case(layers: int, fan_in: int, **options: Any) -> Case:
    """Return the case of a vision transformer for CIFAR: 65 tokens of width 192.

    Ours is the plain one rewired, as in docs/guides/rewire.md; a module is a whole layer, attention and MLP. Its masks
    start near the old wiring, so nearly all layers are read and trained in every step. (With uniform masks many
    layers are not read; their backward passes do not run, and the stack takes less time than a plain network.)
    """

    def plain() -> nn.Module:
        return PlainTransformer(layers, 192, 3, CLASSES)

    return Case(
        about=f"Transformer-{layers}, K={fan_in}",
        network=lambda connectivity: rewire(plain(), "blocks", fan_in, connectivity=connectivity),
        plain=plain,
        forms=OF_SEQUENCES,
        **options,
    )


BARS = {
    "resnet38": Limits(time={128: 1.5, 32: 1.57}, memory=1.33, operations=2.9),
    "resnet74": Limits(time={128: 1.65, 32: 1.75}, memory=1.33, operations=3.95),
    "resnet110": Limits(time={128: 1.83, 32: 1.96}, memory=1.33, operations=4.8),
    "resnext29-8-8": Limits(time={128: 4.1, 32: 4.3}, memory=2.45, operations=13.7),
    "resnext29-64-8": Limits(time={8: 1.6}, memory=2.0, operations=10.0),
    "transformer12": Limits(time={32: 1.18}, memory=1.10, operations=1.45),
}
"""Times are about 15 % above the larger of the ratios on two processors, which differ by a fifth, except for resnet74
(interpolated) and resnext29-64-8 (not measured over today's plain network). Memory and operations do not vary, and are
a few percent above what was counted."""

AIMS = {
    "resnet38": Limits(time={128: 1.05, 32: 1.08}, memory=1.10, operations=1.5),
    "resnet74": Limits(time={128: 1.10, 32: 1.10}, memory=1.10, operations=1.5),
    "resnet110": Limits(time={128: 1.15, 32: 1.20}, memory=1.10, operations=1.5),
    "resnext29-8-8": Limits(time={128: 2.0, 32: 2.0}, memory=1.8, operations=1.5),
    "resnext29-64-8": Limits(time={8: 1.2}, memory=1.8, operations=1.5),
    "transformer12": Limits(time={32: 1.02}, memory=1.10, operations=1.2),
}

BUILDERS = {
    "resnet38": partial(resnet_case, 38, 10),
    "resnet74": partial(resnet_case, 74, 15),
    "resnet110": partial(resnet_case, 110, 20),
    "resnext29-8-8": partial(resnext_case, 8, 8, 4),
    "resnext29-64-8": partial(resnext_case, 64, 8, 4, batches=(8,)),
    "transformer12": partial(transformer_case, 12, 2, batches=(32,)),
}

CASES = {name: case(bar=BARS[name], aim=AIMS[name]) for name, case in BUILDERS.items()}
