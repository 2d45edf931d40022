"""The tables of a recipe. Every field can be set in the TOML file and from the command line.

The text below a field is its meaning, the second part of `Annotated` its allowed values. `reference.py` prints both.
Fields without a default are required. TOML has no null: where None is possible, a recipe says "none".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from maskconnect.core.blend import Blend, default_floor
from maskconnect.core.checks import decay_of
from maskconnect.core.draw import Draw
from maskconnect.core.learning import CREDITS, GRADIENTS, check_credit
from maskconnect.data.augment import Augmentation
from maskconnect.data.catalog import NAMES
from maskconnect.errors import ConfigError, cut, integer, text, unknown_name
from maskconnect.limits import within
from maskconnect.recipes.network import Network

__all__ = ["Data", "LearningTable", "Network", "Paper", "Phase", "Recipe", "Training"]

LABELS = ("fine", "coarse")
WAYS = ("draw", "blend")
SHARE = "at least 0, below 1"


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The results that the paper reports for this network. Accuracies are in %, parameters in millions."""

    where: str
    """The table, figure or section of the paper, such as "table 1"."""
    accuracy: float | None = None
    """The top-1 accuracy; the best one if the paper reports several runs."""
    top5: float | None = None
    """The top-5 accuracy."""
    mean: float | None = None
    """The mean accuracy over the paper's runs."""
    std: float | None = None
    """The standard deviation over the paper's runs."""
    parameters: float | None = None
    """The number of parameters during training."""
    pruned: float | None = None
    """The number of parameters after unused blocks are removed (section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images to train and test on."""

    name: Annotated[str, NAMES]
    """The data set. `maskconnect data list` describes each."""
    labels: Annotated[str, LABELS] = "fine"
    """cifar100: whether to use its 100 fine or its 20 coarse classes."""
    validation: Annotated[int, "0 or more"] = 0
    """The number of training images to set aside for validation, balanced over classes."""
    train_images: Annotated[int | None, "1 or more"] = None
    """The number of images to train on, balanced over classes. If none, all."""
    test_images: Annotated[int | None, "1 or more"] = None
    """The number of images to test on, balanced over classes. If none, all."""
    shrink: Annotated[int, "1 or more"] = 1
    """Images in memory are averaged over squares with this side, in pixels."""

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
class Training:
    """How weights are trained, in all phases (appendix, implementation details)."""

    batch_size: Annotated[int, "1 or more"]
    """The number of images per optimizer step, over all ranks together."""
    weight_decay: Annotated[float, "0 or more"]
    """The weight decay of SGD. It does not apply to masks."""
    momentum: Annotated[float, SHARE] = 0.9
    """The momentum of SGD. It does not apply to masks."""
    nesterov: bool = False
    """Whether to use Nesterov momentum. It needs a momentum above 0."""
    norm_group: Annotated[int | None, "2 or more"] = None
    """The number of images that batch norm sees at a time, as on one GPU of the paper. If none, the whole batch."""
    accumulate: Annotated[int, "1 to batch_size"] = 1
    """The number of parts in which a batch goes through the network. More parts need less memory."""
    reestimate: Annotated[int, "0 or more"] = 0
    """The number of batches from which batch-norm statistics are re-estimated for the frozen wiring (D11)."""
    evaluate_every: Annotated[int, "0 or more"] = 1
    """The number of epochs between evaluations; each phase also ends with one. If 0, only the last epoch does."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate"):
            within(f"training.{name}", getattr(self, name))
        for name in ("reestimate", "evaluate_every"):
            within(f"training.{name}", getattr(self, name), least=0)
        if self.norm_group is not None:
            within("training.norm_group", self.norm_group, least=2)
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"training.accumulate is {self.accumulate}; it must be at most training.batch_size, {self.batch_size}."
            )
        _rate("training.weight_decay", self.weight_decay)
        _share("training.momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ConfigError("training.nesterov is true and training.momentum is 0; set a momentum above 0.")


@dataclass(frozen=True, kw_only=True)
class LearningTable:
    """How masks learn: `mc.Draw` or `mc.Blend`, whose defaults apply to fields that are left out."""

    way: Annotated[str, WAYS] = "draw"
    """Each pass draws K sources per module (Algorithm 1, section 3.3), or reads a weighted mix of all candidates."""
    gradient: Annotated[str, ("default", *GRADIENTS)] = "default"
    """How masks use their gradient. Default: plain for draw (section 3.3), direction for blend. none is a control."""
    credit: Annotated[str, CREDITS] = "whole"
    """The part of a source that counts for its mask: the whole of it (section 3.3), or only what is new in it."""
    images: Annotated[int | None, "1 or more"] = None
    """About how many images of a batch each mask gradient is computed from. If none, all."""
    temperature: Annotated[float | None, "0 or 1"] = None
    """draw: 1 draws sources (section 3.3), 0 reads the top-K. If none, 1."""
    cool: bool | None = None
    """draw: whether draws gradually become the top-K while masks learn. If none, they do not."""
    uniform_floor: Annotated[float | None, SHARE] = None
    """blend: the share of each mask that is spread evenly. If none, 0.1, or 0 if mask_init is below 1."""
    decay: bool | None = None
    """blend: whether mask updates become smaller as the top-K takes over. If none, they do not."""
    keep: Annotated[float | None, "above 0, at most 1"] = None
    """blend: the share of all parameters that used modules may hold when learning ends. If none, all."""

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown_name("learning.way", self.way, WAYS)
        drawing = self.way == "draw"
        for name in ("uniform_floor", "decay", "keep") if drawing else ("temperature", "cool"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"learning.{name} is {getattr(self, name)}; learning.way={self.way!r} does not have this field. "
                    "Remove it, or set it to none."
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
        """Return the way to learn over this number of steps."""
        names = ("gradient", "credit", "images", "temperature", "uniform_floor", "decay", "keep")
        given = {name: getattr(self, name) for name in names if getattr(self, name) not in (None, "default")}
        if self.way == "blend":
            return Blend(steps=steps, **given)
        return Draw(steps=steps if self.cool else None, **given)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Epochs with one learning rate. Masks learn if `mask_lr` is above 0 and are frozen if it is 0 (appendix)."""

    name: str
    """The name of the phase, unique within the recipe."""
    epochs: Annotated[int, "1 or more"]
    """The number of epochs."""
    lr: Annotated[float, "0 or more"]
    """The learning rate of the weights."""
    mask_lr: Annotated[float, "0 or more"] = 0.0
    """The learning rate of the masks. No phase after the first with 0 can have another value."""

    def __post_init__(self) -> None:
        called = f"phase.{cut(text('the name of a phase', self.name))}"
        within(f"{called}.epochs", self.epochs)
        _rate(f"{called}.lr", self.lr)
        _rate(f"{called}.mask_lr", self.mask_lr)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a run computes."""

    name: str
    """The name of the recipe. If a file does not set it, the name that it was loaded by."""
    about: str = ""
    """One line that describes the recipe."""
    seed: Annotated[int, "at least 0, below `2**63`"] = 0
    """The seed of weights, draws, random wiring, the order of images and augmentation."""
    init_from: str | None = None
    """The folder of a run from whose trained weights to start."""
    paper: Paper | None = None
    """The results that the paper reports for this network."""
    data: Data
    """The images to train and test on."""
    augmentation: Augmentation
    """How images are cropped, flipped and normalized."""
    model: Network
    """The network to train."""
    training: Training
    """How weights are trained."""
    learning: LearningTable = LearningTable()
    """How masks learn."""
    phase: tuple[Phase, ...]
    """The phases, in order; at least one."""

    def __post_init__(self) -> None:
        text("name", self.name)
        text("about", self.about)
        text("init_from", self.init_from or "")
        if not 0 <= integer("seed", self.seed) < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and below 2**63.")
        if not self.phase:
            raise ConfigError("the recipe has no phase; add at least one [[phase]].")
        found = [phase.name for phase in self.phase]
        if len(set(found)) < len(found):
            raise ConfigError(f"the phases are named {', '.join(map(cut, found))}; give each a different name.")
        learning = [phase.mask_lr > 0 for phase in self.phase]
        if sorted(learning, reverse=True) != learning:
            raise ConfigError(
                "a phase with mask_lr above 0 follows one with mask_lr 0; frozen masks stay frozen. Reorder the phases."
            )
        if self.model.connectivity == "learned" and not learning[0]:
            raise ConfigError(
                f"model.connectivity is 'learned', but phase.{found[0]}.mask_lr is 0; set it above 0, such as to 0.3."
            )
        if self.learning.way == "blend" and self.learning.uniform_floor is None:
            floor = default_floor(decay_of(self.model.mask_init))
            object.__setattr__(self, "learning", replace(self.learning, uniform_floor=floor))
        if self.learning.credit == "new" and self.model.architecture == "resnext":
            raise ConfigError("learning.credit is 'new', which resnext does not support; set it to 'whole'.")
        try:
            check_credit(self.learning.credit, self.model.aggregation)
        except ConfigError as error:
            raise ConfigError(f"learning.{error}") from None

    @property
    def epochs(self) -> int:
        """The number of epochs in all phases together."""
        return sum(phase.epochs for phase in self.phase)

    @property
    def learns(self) -> bool:
        """Whether connectivity is learned; otherwise it is fixed from the start."""
        return bool(self.model.connectivity == "learned")

    def steps_of_learning(self, batches: int) -> int:
        """Return the number of steps for which masks learn, if an epoch has this number of batches."""
        return batches * sum(phase.epochs for phase in self.phase if phase.mask_lr)

    @property
    def masks_in_training(self) -> str:
        """The masks that a training pass reads while they learn, in words."""
        return "blended masks" if self.learning.way == "blend" else "drawn masks"

    @property
    def frozen_to(self) -> str:
        """The wiring that masks are frozen to, in words."""
        return "a random wiring" if self.learning.gradient == "none" else "top-K"


def _rate(name: str, found: float) -> None:
    if not 0 <= found < math.inf:
        raise ConfigError(f"{name} is {found}; it must be 0 or more, and finite.")


def _share(name: str, found: float) -> None:
    if not 0 <= found < 1:
        raise ConfigError(f"{name} is {found}; it must be at least 0 and below 1.")
