"""The part of a spec that all families of networks share; it is checked once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar

from maskconnect.core.layers import LayerAggregation
from maskconnect.core.stack import MaskedStack
from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, unknown_name
from maskconnect.limits import CONNECTIONS, MODULES, at_most, within
from maskconnect.models.blocks import STEMS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The fields that are the same for every family. `connectivity` is that of `mc.MaskedStack`."""

    FAMILY: ClassVar[str]
    PLAIN: ClassVar[str]  # the connectivity of the standard network, such as a plain ResNet
    LAYERED: ClassVar[bool]  # whether a layer has branches that read those of the layer before
    AGGREGATIONS: ClassVar[tuple[str, ...]] = ("mean", "residual", "stream", "sum", "scaled")

    num_classes: int
    fan_in: int | None = None
    connectivity: str | Sequence[Any] = "learned"
    aggregation: str = "mean"
    stem: str = "cifar"
    in_channels: int = 3
    mask_init: str | float = "uniform"
    use_all: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_classes", "in_channels"):
            within(name, getattr(self, name))
        if isinstance(self.fan_in, int):  # the stack checks the rest
            at_most("fan_in", self.fan_in)
        one_of("stem", self.stem, STEMS)
        one_of("aggregation", self.aggregation, self.AGGREGATIONS)
        object.__setattr__(self, "connectivity", _unchanging(self.connectivity))
        self._check_together()

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of this network, such as `ResNet-38`."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The field that sets its size, and the value: `depth 38`."""

    @property
    @abstractmethod
    def stages(self) -> tuple[int, ...]:
        """The number of layers of each stage."""

    @property
    @abstractmethod
    def modules(self) -> tuple[int, ...]:
        """The number of modules of each layer."""

    @property
    def layout(self) -> Layout:
        """The layout of the modules of the network."""
        return Layout(self.modules, self.LAYERED, self.aggregation == "stream")

    @property
    @abstractmethod
    def plain_words(self) -> str:
        """A description of the network with `PLAIN` connectivity: `as in plain ResNet`."""

    @property
    def module_kinds(self) -> tuple[str, ...]:
        """The kind of each module, in the order in which they run; empty if all are of one kind."""
        return ()

    def _check_together(self) -> None:
        """Fail if all sizes together describe a network that takes more than seconds to build."""
        modules = sum(self.modules)
        connections = sum(a * b for a, b in pairwise(self.modules)) if self.LAYERED else modules * (modules - 1) // 2
        if modules > MODULES or connections > CONNECTIONS:
            raise ConfigError(
                f"{self.size} makes {modules:,} modules that could learn {connections:,} connections; the "
                f"limits are {MODULES:,} and {CONNECTIONS:,}. Use a smaller network."
            )

    def stack(self, modules: Sequence[Any], aggregation: LayerAggregation | None = None) -> MaskedStack:
        """Connect the modules as the spec says; `aggregation` is the module for the aggregation that it names."""
        return MaskedStack(
            modules,
            self.fan_in,
            connectivity=self.connectivity,
            aggregation=self.aggregation if aggregation is None else aggregation,
            mask_init=self.mask_init,
            use_all=self.use_all,
            seed=self.seed,
        )

    def describe(self) -> dict[str, Any]:
        """Return the spec as plain data; `maskconnect.models.read_spec` reads it back."""
        return {"family": self.FAMILY, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class DepthSpec(Spec):
    """The same for networks of equal modules, whose number depends on the depth."""

    depth: int

    def __post_init__(self) -> None:
        within("depth", self.depth)
        super().__post_init__()

    @property
    def size(self) -> str:
        """The field that sets its size, and the value."""
        return f"depth {self.depth}"

    def modules_per_stage(self, layers_per_block: int, imagenet: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the modules of each stage: n, n, n for CIFAR and Mini-ImageNet, where the depth is 3*layers*n + 2."""
        if self.stem == "imagenet":
            if self.depth not in imagenet:
                known = ", ".join(map(str, imagenet))
                raise ConfigError(f"depth is {self.depth}; with stem='imagenet' it must be one of {known}.")
            return imagenet[self.depth]
        unit = 3 * layers_per_block
        n = (self.depth - 2) // unit
        if n < 1 or self.depth != unit * n + 2:
            near = [unit * k + 2 for k in (n, n + 1) if k > 0] or [unit + 2]
            hint = " For an ImageNet network pass stem='imagenet'." if self.depth in imagenet else ""
            raise ConfigError(
                f"depth is {self.depth}; with stem={self.stem!r} it must be {unit}n+2, such as "
                f"{' or '.join(map(str, near))}.{hint}"
            )
        return (n, n, n)


def one_of(name: str, found: object, known: Iterable[str]) -> None:
    """Fail if `found` is not one of the names."""
    if not isinstance(found, str) or found not in known:
        raise unknown_name(name, found, known)


def _unchanging(wiring: Any) -> Any:
    """Return a wiring as tuples, so that later changes of the original have no effect."""
    return tuple(map(_unchanging, wiring)) if isinstance(wiring, Sequence) and not isinstance(wiring, str) else wiring
