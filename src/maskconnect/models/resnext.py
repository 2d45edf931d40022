"""ResNeXt with learned connectivity between the branches of adjacent modules (sections 3.5 and 4.2, tables 6 and 7).

    stem      depth     modules of a stage    stem width        module outputs            branch widths
    cifar     9n+2      n, n, n               16; 64 for w=64   64, 128, 256 (4 times     w, 2w, 4w
    mini      the same, after a max pool                        the stem for w=64)
    imagenet  50        3, 4, 6, 3            64                256, 512, 1024, 2048      w, 2w, 4w, 8w
              101, 152  3, 4, 23, 3; 3, 8, 36, 3

A module is C parallel branches F_k: 1x1, 3x3, 1x1. Branch j of the next module reads (D2)

    x_j = ReLU( sum_k m_jk F_k(x_k) + (1/K_j) sum_k m_jk S(x_k) )

where S is the shortcut: the identity or, where the shape changes, one projection per module that its branches share.
With K = C this is ResNeXt; with K = 1 it is C residual chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError
from maskconnect.limits import within
from maskconnect.models.blocks import STEMS, Classifier, bottleneck
from maskconnect.models.branches import (
    BlockTotal,
    Branch,
    JoinedBranches,
    ResidualSum,
    SharedBatchNorm,
    SharedProjection,
)
from maskconnect.models.spec import DepthSpec, one_of

IMAGENET = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
NORMS = ("branch", "sum")


@dataclass(frozen=True, kw_only=True)
class ResNeXtSpec(DepthSpec):
    """The fields of a ResNeXt: {depth, width, cardinality}, and how its branches are joined."""

    FAMILY: ClassVar[str] = "resnext"
    PLAIN: ClassVar[str] = "full"
    LAYERED: ClassVar[bool] = True
    AGGREGATIONS: ClassVar[tuple[str, ...]] = ("residual", "mean", "sum")

    width: int
    cardinality: int
    aggregation: str = "residual"
    norm: str = "branch"

    def __post_init__(self) -> None:
        within("width", self.width)
        within("cardinality", self.cardinality)
        super().__post_init__()
        one_of("norm", self.norm, NORMS)
        if self.norm == "sum" and self.aggregation != "residual":
            raise ConfigError(
                f"norm='sum' normalizes the sum of residuals, which aggregation={self.aggregation!r} does not compute; "
                "use norm='branch'."
            )

    @property
    def title(self) -> str:
        """The name of this network, with {depth, width, cardinality}."""
        return f"ResNeXt {{{self.depth},{self.width},{self.cardinality}}}"

    @property
    def plain_words(self) -> str:
        """A description of the network with `PLAIN` connectivity."""
        return "as in plain ResNeXt"

    @property
    def modules(self) -> tuple[int, ...]:
        """C branches per layer; a layer is a module of the paper."""
        return (self.cardinality,) * sum(self.stages)

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of modules of each stage."""
        return self.modules_per_stage(3, IMAGENET)

    @property
    def stem_width(self) -> int:
        """The channels that the first module reads; its output has four times as many."""
        return 64 if self.stem == "imagenet" else max(16, self.width)


@dataclass(frozen=True)
class Module:
    """One module of C branches: a bracket of table 6."""

    inputs: int
    width: int  # of the bottleneck of each branch
    outputs: int
    stride: int


def modules_of(spec: ResNeXtSpec) -> list[Module]:
    """Return the modules, as in tables 6 and 7."""
    modules, inputs = [], spec.stem_width
    for stage, count in enumerate(spec.stages):
        outputs = 4 * spec.stem_width * 2**stage
        for number in range(count):
            modules.append(Module(inputs, spec.width * 2**stage, outputs, 2 if stage and number == 0 else 1))
            inputs = outputs
    return modules


def build_resnext(spec: ResNeXtSpec) -> Classifier:
    """Build the network that `spec` describes."""
    modules, C = modules_of(spec), spec.cardinality
    stem = STEMS[spec.stem](spec.in_channels, spec.stem_width)
    shortcuts = [SharedProjection(m.inputs, m.outputs, m.stride) if m.inputs != m.outputs else None for m in modules]
    branches = [[Branch(residual_of(m, spec)) for _ in range(C)] for m in modules]
    aggregation: JoinedBranches
    if spec.aggregation == "residual":
        aggregation = ResidualSum(shortcuts, [SharedBatchNorm(m.outputs) for m in modules if spec.norm == "sum"])
    else:
        aggregation = BlockTotal(shortcuts, mean=spec.aggregation == "mean")
    stack = spec.stack(branches, aggregation)
    if spec.aggregation == "residual" and spec.norm == "branch":
        start_scales_(branches, stack)
    return Classifier(spec, stem, stack, modules[-1].outputs, spec.num_classes)


def residual_of(module: Module, spec: ResNeXtSpec) -> nn.Sequential:
    """Return F of one branch, without its last batch norm if there is one over the sum of branches."""
    layers = bottleneck(module.inputs, module.width, module.outputs, module.stride, branches=spec.cardinality)
    return layers if spec.norm == "branch" else nn.Sequential(*list(layers)[:-1])


def start_scales_(branches: list[list[Branch]], stack: MaskedStack) -> None:
    """Start the last batch norm of a branch at 1/K, because K branches are summed; at 1/C in the last module (D2)."""
    C = len(branches[0])
    readers_LC = stack.masks.fan_in.reshape(-1, C).tolist()
    for layer, fan_in in zip(branches, [*readers_LC, [C]], strict=True):
        for branch in layer:
            norm = branch.residual[-1]
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.constant_(norm.weight, len(fan_in) / sum(fan_in))


def resnext(
    depth: int,
    width: int,
    cardinality: int,
    num_classes: int,
    fan_in: int | None = None,
    *,
    connectivity: str | Sequence[Any] = "learned",
    aggregation: str = "residual",
    norm: str = "branch",
    stem: str = "cifar",
    in_channels: int = 3,
    mask_init: str | float = "uniform",
    use_all: bool = False,
    seed: int = 0,
) -> Classifier:
    """Build a ResNeXt whose branches learn which K branches of the last module to read: `mc.resnext(29, 8, 8, 100, 4)`.

    Args:
        depth: D, the number of layers: 9n+2 (20 and 29 in the paper), or 50, 101, 152 with stem="imagenet".
        width: w, the channels of the bottleneck of each branch in the first stage.
        cardinality: C, the number of branches per module.
        num_classes: the number of classes.
        fan_in: K, the number of branches that a branch reads. Not needed if `connectivity` determines it.
        connectivity: "learned", "full" (plain ResNeXt), "random", "prev" (C chains), or an explicit wiring.
        aggregation: "residual" (residuals summed, shortcuts averaged, then ReLU: with K=C it is ResNeXt), or the
            "mean" or the "sum" of whole blocks.
        norm: "branch", a batch norm after every branch, as in the paper's parameter counts; or "sum", one over the
            sum of the branches, as in the published ResNeXt.
        stem: "cifar" (3x3), "mini" (3x3 and a max pool) or "imagenet" (7x7 and a max pool).
        in_channels: the channels of the images.
        mask_init, use_all: the initial real masks, and whether every branch must be read, as in `mc.MaskedStack`.
        seed: the seed of draws and of random connectivity. Weights come from torch's global generator.
    """
    return build_resnext(
        ResNeXtSpec(
            depth=depth,
            width=width,
            cardinality=cardinality,
            num_classes=num_classes,
            fan_in=fan_in,
            connectivity=connectivity,
            aggregation=aggregation,
            norm=norm,
            stem=stem,
            in_channels=in_channels,
            mask_init=mask_init,
            use_all=use_all,
            seed=seed,
        )
    )
