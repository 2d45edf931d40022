"""The [model] table of a recipe: which network to train.

The text below a field is its meaning, the second part of `Annotated` its allowed values. `reference.py` prints both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from maskconnect.core.checks import AGGREGATIONS, decay_of, fan_in_of_targets, fixed_sources
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, MaskConnectError, shown, unknown_name
from maskconnect.models import FAMILIES, Spec
from maskconnect.models.blocks import STEMS
from maskconnect.models.kinds import KINDS
from maskconnect.models.resnext import NORMS

NEEDS = {"resnet": ("depth",), "resnext": ("depth", "width", "cardinality"), "mixed": ("layers", "width")}
"""The sizes that a network of each family must have."""
MAY_HAVE = {"resnet": (), "resnext": ("norm",), "mixed": ("kinds",)}
JOINS = {"resnet": "mean", "resnext": "residual", "mixed": "mean"}
"""How a recipe that does not name its aggregation joins sources. Every recipe that is written names it, so that results
keep their meaning if the default of `mc.resnet` changes."""
WIRINGS = '"learned", "prev", "full", "random", or a nested list of sources'


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network to train. The data set decides the number of classes and channels."""

    architecture: Annotated[str, tuple(FAMILIES)]
    """The family of networks."""
    depth: Annotated[int | None, "1 or more"] = None
    """resnet, resnext: the number of layers, D (section 4.1). With the cifar stem 6n+2 (resnet) or 9n+2 (resnext)."""
    layers: Annotated[tuple[int, ...] | None, "each 1 or more"] = None
    """mixed: the number of layers in each stage."""
    width: Annotated[int | None, "1 or more"] = None
    """resnext: the bottleneck width w of a branch in the first stage (section 4.1). mixed: the channels of a branch."""
    cardinality: Annotated[int | None, "1 or more"] = None
    """resnext: the number of branches per module, C (section 3.5)."""
    kinds: Annotated[tuple[str, ...] | None, tuple(KINDS)] = None
    """mixed: the operation of each branch of a layer. If none, a layer has one branch of each kind."""
    fan_in: Annotated[int | None, "1 or more"] = None
    """The number of sources that each module reads, K (section 3.2). Learned and random connectivity need it."""
    connectivity: Annotated[Any, WIRINGS] = "learned"
    """Which modules feed which: learned together with the weights, or fixed from the start (sections 3.3 and 4.1)."""
    aggregation: Annotated[str | None, AGGREGATIONS] = None
    """How the sources of a module are joined (Eq. 1, section 3.2). If none, residual for resnext, else mean."""
    norm: Annotated[str | None, NORMS] = None
    """resnext: one batch norm per branch, or one over the sum of all branches. If none, one per branch."""
    stem: Annotated[str, tuple(STEMS)] = "cifar"
    """The first layers: a 3x3 convolution; the same and a max pool; or a 7x7 convolution and a max pool (appendix)."""
    mask_init: Annotated[str | float, '"uniform", or above 0 and at most 1'] = "uniform"
    """Where real masks start: all equal, or each source less likely than the next nearer one by this factor."""
    use_all: bool = False
    """Whether every module must be read by another one, in every draw and at the freeze."""

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
        """The description of the network, with stand-ins for what the data and the seed decide."""
        return self.spec(num_classes=2, in_channels=3, seed=0)

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of modules in each stage."""
        return self.shape.stages

    def layout(self) -> Layout:
        """The number of blocks in each layer of the network."""
        return self.shape.layout  # making the spec also checks its fields

    def spec(self, *, num_classes: int, in_channels: int, seed: int) -> Spec:
        """The description that `maskconnect.models.build` takes."""
        if self.architecture not in FAMILIES:
            raise unknown_name("model.architecture", self.architecture, FAMILIES)
        if self.connectivity in ("learned", "random") and self.fan_in is None:
            raise ConfigError(
                f"model.fan_in is missing; {self.connectivity} connectivity needs it. Set it, for example to 4."
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
        """Return the fields that only some families have, checked."""
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
                raise ConfigError(f"{name} is {shown(value)}; only a {' or '.join(owners)} has this field. Remove it.")
        for kind in given.get("kinds", ()):
            if kind not in KINDS:
                raise unknown_name("kinds", kind, KINDS)
        return given
