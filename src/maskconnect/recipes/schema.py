"""What a recipe says. Each part is a table of the TOML file; every field can be set from the command line.

Fields that are left out have the defaults below; those without a default must be given. Where None is possible it is
written "none".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from maskconnect.core.checks import decay_of, fan_in_of_targets, fixed_sources
from maskconnect.core.learning import Blend, Draw, check_credit, default_floor
from maskconnect.core.wiring import Layout
from maskconnect.data.augment import Augmentation
from maskconnect.data.catalog import NAMES
from maskconnect.errors import ConfigError, MaskConnectError, cut, integer, shown, text, unknown_name
from maskconnect.limits import within
from maskconnect.models import FAMILIES, Spec
from maskconnect.models.kinds import KINDS

LABELS = ("fine", "coarse")
WAYS = ("draw", "blend")
NEEDS = {"resnet": ("depth",), "resnext": ("depth", "width", "cardinality"), "mixed": ("layers", "width")}
"""The sizes that a network of each family must have."""
MAY_HAVE = {"resnet": (), "resnext": ("norm",), "mixed": ("kinds",)}
JOINS = {"resnet": "mean", "resnext": "residual", "mixed": "mean"}
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
        within("data.validation", self.validation, least=0)
        within("data.shrink", self.shrink)
        for field in ("train_images", "test_images"):
            if getattr(self, field) is not None:
                within(f"data.{field}", getattr(self, field))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which network; what its classes and channels are, the data say."""

    architecture: str  # "resnet", "resnext" or "mixed"
    depth: int | None = None  # of resnet and resnext
    layers: tuple[int, ...] | None = None  # of mixed: how many each stage has
    width: int | None = None  # of resnext: the bottleneck of a branch of the first stage; of mixed: a branch of it
    cardinality: int | None = None  # of resnext: branches of a module
    kinds: tuple[str, ...] | None = None  # of mixed: what the branches of a layer do; left out: one of each kind
    fan_in: int | None = None  # K
    connectivity: Any = "learned"  # or "prev", "full", "random", or an explicit wiring
    aggregation: str | None = None  # "mean", "residual", "sum", ..., as the family has them. Left out: JOINS
    norm: str | None = None  # of resnext: "branch" (the default) or "sum"
    stem: str = "cifar"  # or "mini", "imagenet"
    mask_init: str | float = "uniform"
    use_all: bool = False  # whether every block is to be read by another, in every draw and at the freeze

    def __post_init__(self) -> None:
        if self.aggregation is None:
            object.__setattr__(self, "aggregation", JOINS.get(self.architecture))
        layout = self.layout()
        candidates = layout.candidates()
        try:
            fan_in = fan_in_of_targets(self.fan_in, layout, candidates)
            fixed_sources(self.connectivity, layout, candidates, fan_in, seed=0)
            decay_of(self.mask_init)
        except MaskConnectError as error:
            raise ConfigError(f"model.{error}") from None

    @property
    def shape(self) -> Spec:
        """The description but for what the data and the seed say."""
        return self.spec(num_classes=2, in_channels=3, seed=0)

    @property
    def stages(self) -> tuple[int, ...]:
        """How many modules each stage has."""
        return self.shape.stages

    def layout(self) -> Layout:
        """How many blocks stand in each layer of the network."""
        return self.shape.layout  # which also checks what it can

    def spec(self, *, num_classes: int, in_channels: int, seed: int) -> Spec:
        """The description that `maskconnect.models.build` takes."""
        if self.architecture not in FAMILIES:
            raise unknown_name("model.architecture", self.architecture, FAMILIES)
        if self.connectivity in ("learned", "random") and self.fan_in is None:
            raise ConfigError(
                f"model.fan_in is missing; {self.connectivity} connectivity needs it, such as model.fan_in=4."
            )
        common = ("aggregation", "fan_in", "connectivity", "stem", "mask_init", "use_all")
        try:
            sizes = self._sizes()
            shared = {name: getattr(self, name) for name in common}
            return FAMILIES[self.architecture](
                **shared, **sizes, num_classes=num_classes, in_channels=in_channels, seed=seed
            )
        except ConfigError as error:
            raise ConfigError(f"model.{error}") from None

    def _sizes(self) -> dict[str, Any]:
        """The fields that only some families have."""
        needed = NEEDS[self.architecture]
        allowed = (*needed, *MAY_HAVE[self.architecture])
        every = dict.fromkeys(name for names in (*NEEDS.values(), *MAY_HAVE.values()) for name in names)
        given = {name: getattr(self, name) for name in every if getattr(self, name) is not None}
        for name in needed:
            if name not in given:
                raise ConfigError(f"{name} is missing; a {self.architecture} needs it.")
        for name, value in given.items():
            if name not in allowed:
                owners = [family for family in NEEDS if name in (*NEEDS[family], *MAY_HAVE[family])]
                raise ConfigError(f"{name} is {shown(value)}; only a {' or '.join(owners)} has it.")
        for kind in given.get("kinds", ()):
            if kind not in KINDS:
                raise unknown_name("kinds", kind, KINDS)
        return given


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the weights are trained, in all phases alike."""

    batch_size: int
    weight_decay: float
    momentum: float = 0.9
    nesterov: bool = False
    norm_group: int | None = None  # batch norm sees so many images at a time, as on one GPU of the paper; else all
    accumulate: int = 1  # a batch goes through the network in so many parts, to save memory
    reestimate: int = 0  # by so many batches are batch-norm statistics found anew for the frozen wiring (D11)
    evaluate_every: int = 1  # epochs, and after the last one of a phase; 0: after the last one of all only

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate"):
            within(f"training.{name}", getattr(self, name))
        for name in ("reestimate", "evaluate_every"):
            within(f"training.{name}", getattr(self, name), least=0)
        if self.norm_group is not None:
            within("training.norm_group", self.norm_group, least=2)
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"training.accumulate is {self.accumulate}; a batch of {self.batch_size} has no so many parts."
            )
        _rate("training.weight_decay", self.weight_decay)
        _part("training.momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ConfigError("training.nesterov needs a training.momentum above 0.")


@dataclass(frozen=True, kw_only=True)
class LearningTable:
    """How masks learn: `mc.Draw` or `mc.Blend`, whose defaults hold where nothing is given."""

    way: str = "draw"  # "draw" K sources in every pass, as in the paper, or "blend" all candidates
    gradient: str = "default"  # "plain" (the default of draw), "direction" (of blend), or "none": a control
    credit: str = "whole"  # what of a source counts for its mask: "whole" as in the paper, or what is "new" in it
    images: int | None = None  # about how many images of a batch each mask gradient is taken over; none: all
    temperature: float | None = None  # of draw: 1 as in the paper, 0 reads the top-K instead of drawing
    cool: bool | None = None  # of draw: whether draws become the top-K over all steps that masks learn for
    uniform_floor: float | None = None  # of blend: the part of each mask that is spread evenly over its candidates
    decay: bool | None = None  # of blend: whether updates become smaller as the top-K takes over; none: no
    keep: float | None = None  # of blend: the part of all parameters that used modules may hold in the end; none: all

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown_name("learning.way", self.way, WAYS)
        drawing = self.way == "draw"
        for name in ("uniform_floor", "decay", "keep") if drawing else ("temperature", "cool"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"learning.{name} is {getattr(self, name)}; learning.way={self.way!r} has no such field. "
                    "Leave it out, or set it to none."
                )
        try:
            how = self.how(steps=1)
        except ConfigError as error:
            raise ConfigError(f"learning.{error}") from None
        resolved: dict[str, Any] = {"gradient": how.gradient}
        if isinstance(how, Draw):
            resolved |= {"temperature": how.temperature, "cool": bool(self.cool)}
        else:
            resolved["uniform_floor"] = how.uniform_floor
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def how(self, steps: int) -> Draw | Blend:
        """The way to learn for this number of steps."""
        names = ("gradient", "credit", "images", "temperature", "uniform_floor", "decay", "keep")
        given = {name: getattr(self, name) for name in names if getattr(self, name) not in (None, "default")}
        if self.way == "blend":
            return Blend(steps=steps, **given)
        return Draw(steps=steps if self.cool else None, **given)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some epochs at one rate. Masks are learned while `mask_lr` is above 0, and frozen when it is 0 (appendix)."""

    name: str
    epochs: int
    lr: float
    mask_lr: float = 0.0

    def __post_init__(self) -> None:
        called = f"phase.{cut(text('the name of a phase', self.name))}"
        within(f"{called}.epochs", self.epochs)
        _rate(f"{called}.lr", self.lr)
        _rate(f"{called}.mask_lr", self.mask_lr)


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
    learning: LearningTable = LearningTable()
    phase: tuple[Phase, ...]

    def __post_init__(self) -> None:
        text("name", self.name)
        text("about", self.about)
        text("init_from", self.init_from or "")
        if not 0 <= integer("seed", self.seed) < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and below 2**63.")
        if not self.phase:
            raise ConfigError("there is no phase; a recipe needs at least one [[phase]].")
        found = [phase.name for phase in self.phase]
        if len(set(found)) < len(found):
            raise ConfigError(f"phases are called {', '.join(map(cut, found))}; each needs a name of its own.")
        learning = [phase.mask_lr > 0 for phase in self.phase]
        if sorted(learning, reverse=True) != learning:
            raise ConfigError("a phase with mask_lr above 0 comes after one without; masks that are frozen stay so.")
        if self.model.connectivity == "learned" and not learning[0]:
            raise ConfigError(
                f"model.connectivity is 'learned', but phase.{found[0]}.mask_lr is 0; set it, to 0.3 perhaps."
            )
        if self.learning.way == "blend" and self.learning.uniform_floor is None:
            floor = default_floor(decay_of(self.model.mask_init))
            object.__setattr__(self, "learning", replace(self.learning, uniform_floor=floor))
        if self.learning.credit == "new" and self.model.architecture == "resnext":
            raise ConfigError("learning.credit is 'new', which a resnext does not have; set it to 'whole'.")
        try:
            check_credit(self.learning.credit, self.model.aggregation)
        except ConfigError as error:
            raise ConfigError(f"learning.{error}") from None

    @property
    def epochs(self) -> int:
        """Of all phases together."""
        return sum(phase.epochs for phase in self.phase)

    @property
    def learns(self) -> bool:
        """Whether connectivity is learned, or fixed from the start."""
        return bool(self.model.connectivity == "learned")

    def steps_of_learning(self, batches: int) -> int:
        """For how many steps masks learn, where an epoch has this number of batches."""
        return batches * sum(phase.epochs for phase in self.phase if phase.mask_lr)

    @property
    def frozen_to(self) -> str:
        """The wiring that masks are frozen to, in words."""
        return "a random wiring" if self.learning.gradient == "none" else "top-K"


def _rate(name: str, found: float) -> None:
    if not 0 <= found < math.inf:
        raise ConfigError(f"{name} is {found}; it must be a number of 0 or more.")


def _part(name: str, found: float) -> None:
    if not 0 <= found < 1:
        raise ConfigError(f"{name} is {found}; it must be at least 0 and below 1.")
