"""What a recipe says. Each part is a table of the TOML file; every field can be set from the command line.

Fields that are left out have the defaults below; those without a default must be given. Where None is possible it is
written "none".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from maskconnect.core.arguments import decay_of, fan_in_of_targets, fixed_sources
from maskconnect.core.loop import GRADIENTS
from maskconnect.core.wiring import Layout
from maskconnect.data.augment import Augmentation
from maskconnect.data.catalog import NAMES
from maskconnect.errors import ConfigError, MaskConnectError, integer, unknown_name
from maskconnect.models import ResNetSpec, ResNeXtSpec

DEEPEST = 10_000
ARCHITECTURES = ("resnet", "resnext")
LABELS = ("fine", "coarse")
JOINS = {"resnet": "mean", "resnext": "residual"}
"""How a recipe that does not name its aggregation joins sources. Every recipe that is written names it, so that results
keep their meaning whatever becomes the default of `mc.resnet`."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What the paper says of this very network. Accuracies are in %, parameters in millions."""

    where: str  # "table 1"
    accuracy: float | None = None  # top-1; the best of its runs where it has several
    top5: float | None = None
    mean: float | None = None  # over its runs
    std: float | None = None
    parameters: float | None = None  # while training
    pruned: float | None = None  # after unused blocks are gone


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images."""

    name: str  # as in `maskconnect data list`
    labels: str = "fine"  # of cifar100: "fine" or "coarse"
    validation: int = 0  # training images set aside, of every class alike
    train_images: int | None = None  # train on so many, of every class alike; else on all
    test_images: int | None = None  # test on so many, of every class alike; else on all
    shrink: int = 1  # images in memory are averaged over squares of this side

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise unknown_name("data.name", self.name, NAMES)
        if self.labels not in LABELS:
            raise unknown_name("data.labels", self.labels, LABELS)
        _at_least(0, "data.validation", self.validation)
        _at_least(1, "data.shrink", self.shrink)
        for field in ("train_images", "test_images"):
            if getattr(self, field) is not None:
                _at_least(1, f"data.{field}", getattr(self, field))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which network; what its classes and channels are, the data say."""

    architecture: str  # "resnet" or "resnext"
    depth: int
    width: int | None = None  # of resnext: the bottleneck of a branch of the first stage
    cardinality: int | None = None  # of resnext: branches of a module
    fan_in: int | None = None  # K
    connectivity: Any = "learned"  # or "prev", "full", "random", or an explicit wiring
    aggregation: str | None = None  # "residual", "mean", "sum"; resnet also "stream", "root", "scaled". Left out: JOINS
    norm: str | None = None  # of resnext: "branch" (the default) or "sum"
    stem: str = "cifar"  # or "mini", "imagenet"
    mask_init: str | float = "uniform"
    mask_credit: str = "whole"  # what of a source counts for its mask: "whole" as in the paper, or what is "new" in it
    use_all: bool = False  # whether every block is to be read by another, in every draw and at the freeze

    def __post_init__(self) -> None:
        if self.aggregation is None:
            object.__setattr__(self, "aggregation", JOINS.get(self.architecture))
        if integer("model.depth", self.depth) > DEEPEST:
            raise ConfigError(f"model.depth is {self.depth}; that is beyond {DEEPEST:,}, and surely not meant.")
        layout = self.layout()
        candidates = layout.candidates()
        try:
            fan_in = fan_in_of_targets(self.fan_in, layout, candidates)
            fixed_sources(self.connectivity, layout, candidates, fan_in, seed=0)
            decay_of(self.mask_init)
        except MaskConnectError as error:
            raise ConfigError(f"model.{error}") from None

    @property
    def stages(self) -> tuple[int, ...]:
        """How many modules each stage has."""
        return self.spec(num_classes=2, in_channels=3, seed=0).stages  # which also checks what it can

    def layout(self) -> Layout:
        """How many blocks stand in each layer of the network."""
        sizes, layered = (self.cardinality or 1,) * sum(self.stages), self.architecture == "resnext"
        return Layout(sizes, layered, all_out=self.aggregation == "stream")

    def spec(self, *, num_classes: int, in_channels: int, seed: int) -> ResNetSpec | ResNeXtSpec:
        """The description that `maskconnect.models.build` takes."""
        if self.architecture not in ARCHITECTURES:
            raise unknown_name("model.architecture", self.architecture, ARCHITECTURES)
        if self.connectivity in ("learned", "random") and self.fan_in is None:
            raise ConfigError(
                f"model.fan_in is missing; {self.connectivity} connectivity needs it, such as model.fan_in=4."
            )
        named = {name: getattr(self, name) for name in ("aggregation", "norm", "width", "cardinality")}
        given = {name: value for name, value in named.items() if value is not None}
        common: dict[str, Any] = {
            **{"depth": self.depth, "fan_in": self.fan_in, "connectivity": self.connectivity, "stem": self.stem},
            **{
                "mask_init": self.mask_init,
                "mask_credit": self.mask_credit,
                "use_all": self.use_all,
                "num_classes": num_classes,
                "in_channels": in_channels,
                "seed": seed,
            },
        }
        try:
            if self.architecture == "resnext":
                for name in ("width", "cardinality"):
                    if name not in given:
                        raise ConfigError(f"{name} is missing; a resnext needs it.")
                return ResNeXtSpec(**common, **given)
            for name in ("width", "cardinality", "norm"):
                if name in given:
                    raise ConfigError(f"{name} is {given[name]!r}; only a resnext has it.")
            return ResNetSpec(**common, **given)
        except ConfigError as error:
            raise ConfigError(f"model.{error}") from None


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the weights are trained, in all phases alike."""

    batch_size: int
    weight_decay: float
    momentum: float = 0.9
    nesterov: bool = False
    mask_gradient: str = (
        "plain"  # what masks are updated with: "plain" as in the paper, "centred", "direction"; "none": never
    )
    mask_momentum: float = 0.0
    norm_group: int | None = None  # batch norm sees so many images at a time, as on one GPU of the paper; else all
    accumulate: int = 1  # a batch goes through the network in so many parts, to save memory
    reestimate: int = 0  # by so many batches are batch-norm statistics found anew for the frozen wiring (D11)
    evaluate_every: int = 1  # epochs, and after the last one of a phase; 0: after the last one of all only

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate"):
            _at_least(1, f"training.{name}", getattr(self, name))
        for name in ("reestimate", "evaluate_every"):
            _at_least(0, f"training.{name}", getattr(self, name))
        if self.norm_group is not None:
            _at_least(2, "training.norm_group", self.norm_group)
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"training.accumulate is {self.accumulate}; a batch of {self.batch_size} has no so many parts."
            )
        _rate("training.weight_decay", self.weight_decay)
        _part("training.momentum", self.momentum)
        _part("training.mask_momentum", self.mask_momentum)
        if self.mask_gradient not in GRADIENTS:
            raise unknown_name("training.mask_gradient", self.mask_gradient, GRADIENTS)
        if self.nesterov and not self.momentum:
            raise ConfigError("training.nesterov needs a training.momentum above 0.")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some epochs at one rate. Masks are learned while `mask_lr` is above 0, and frozen when it is 0 (appendix)."""

    name: str
    epochs: int
    lr: float
    mask_lr: float = 0.0
    temperature: float = 1.0  # of the draws: 1 as in the paper, 0 takes the top-K itself
    cool_to: float | None = None  # the temperature goes from there to here, step by step
    blend: bool = False  # whether to read all candidates, each in part, where the paper draws K of them
    even: float = 0.0  # how much of each mask is spread evenly over its candidates then: none is given up untrained

    def __post_init__(self) -> None:
        _at_least(1, f"phase.{self.name}.epochs", self.epochs)
        _rate(f"phase.{self.name}.lr", self.lr)
        _rate(f"phase.{self.name}.mask_lr", self.mask_lr)
        _rate(f"phase.{self.name}.temperature", self.temperature)
        if self.cool_to is not None:
            _rate(f"phase.{self.name}.cool_to", self.cool_to)
        if self.blend and self.cool_to != 0:
            raise ConfigError(
                f"phase.{self.name}.blend is true; then phase.{self.name}.cool_to must be 0.0, so that at its end "
                "K sources are read as a whole, and no other."
            )
        _part(f"phase.{self.name}.even", self.even)
        if self.even and not self.blend:
            raise ConfigError(f"phase.{self.name}.even is {self.even}, which takes phase.{self.name}.blend=true.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what a run computes."""

    name: str  # the loader says it, where the file does not
    about: str = ""
    seed: int = 0  # of weights, draws, random wiring, order and augmentation
    init_from: str | None = None  # a run whose trained weights to start from
    paper: Paper | None = None
    data: Data
    augmentation: Augmentation
    model: Network
    training: Training
    phase: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not 0 <= integer("seed", self.seed) < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and below 2**63.")
        if not self.phase:
            raise ConfigError("there is no phase; a recipe needs at least one [[phase]].")
        found = [phase.name for phase in self.phase]
        if len(set(found)) < len(found):
            raise ConfigError(f"phases are called {', '.join(found)}; each needs a name of its own.")
        learning = [phase.mask_lr > 0 for phase in self.phase]
        if sorted(learning, reverse=True) != learning:
            raise ConfigError("a phase with mask_lr above 0 comes after one without; masks that are frozen stay so.")
        if self.model.connectivity == "learned" and not learning[0]:
            raise ConfigError(
                f"model.connectivity is 'learned', but phase.{found[0]}.mask_lr is 0; set it, to 0.3 perhaps."
            )

        if self.training.mask_gradient == "none" and any(
            p.blend or 0 in (p.temperature, p.cool_to) for p in self.phase
        ):
            raise ConfigError(
                "training.mask_gradient is 'none', a control that draws from uniform masks; set blend to false, and "
                "temperature and cool_to above 0."
            )

    @property
    def epochs(self) -> int:
        """Of all phases together."""
        return sum(phase.epochs for phase in self.phase)

    @property
    def learns(self) -> bool:
        """Whether connectivity is learned, or fixed from the start."""
        return bool(self.model.connectivity == "learned")

    @property
    def frozen_to(self) -> str:
        """The wiring that masks are frozen to, in words."""
        return "a random wiring" if self.training.mask_gradient == "none" else "top-K"


def _at_least(least: int, name: str, found: object) -> None:
    if integer(name, found) < least:
        raise ConfigError(f"{name} is {found}; it must be {least} or more.")


def _rate(name: str, found: float) -> None:
    if not 0 <= found < math.inf:
        raise ConfigError(f"{name} is {found}; it must be a number of 0 or more.")


def _part(name: str, found: float) -> None:
    if not 0 <= found < 1:
        raise ConfigError(f"{name} is {found}; it must be at least 0 and below 1.")
