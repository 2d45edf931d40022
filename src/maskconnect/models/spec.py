"""What all families say of a network, checked once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from maskconnect.core.wiring import Layout
from maskconnect.errors import ConfigError, unknown_name
from maskconnect.limits import CONNECTIONS, MODULES, at_most, within
from maskconnect.models.blocks import STEMS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The part of a description that is the same for every family. `connectivity` is that of `mc.MaskedStack`."""

    FAMILY: ClassVar[str]
    branches: ClassVar[int | None] = None  # of a module, where it has any
    AGGREGATIONS: ClassVar[tuple[str, ...]] = ("mean", "residual", "stream", "sum", "scaled")

    depth: int
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
        for name in ("depth", "num_classes", "in_channels"):
            within(name, getattr(self, name))
        if isinstance(self.fan_in, int):  # what else is wrong with it, the stack says
            at_most("fan_in", self.fan_in)
        one_of("stem", self.stem, STEMS)
        one_of("aggregation", self.aggregation, self.AGGREGATIONS)
        object.__setattr__(self, "connectivity", _unchanging(self.connectivity))
        self._check_together()

    @property
    @abstractmethod
    def stages(self) -> tuple[int, ...]:
        """How many modules each stage has."""

    @property
    def layout(self) -> Layout:
        """How many modules stand in each layer of the network."""
        branches = self.branches
        return Layout((branches or 1,) * sum(self.stages), branches is not None, self.aggregation == "stream")

    def _check_together(self) -> None:
        """Depth and branches together must not ask for more than can be built in seconds."""
        layers, branches = sum(self.stages), self.branches
        modules = layers * (branches or 1)
        connections = layers * (layers - 1) // 2 if branches is None else (layers - 1) * branches**2
        if modules > MODULES or connections > CONNECTIONS:
            raise ConfigError(
                f"depth {self.depth} makes {modules:,} modules that could learn {connections:,} connections; the "
                f"limits are {MODULES:,} and {CONNECTIONS:,}."
            )

    def describe(self) -> dict[str, Any]:
        """The spec as plain data; `maskconnect.models.read_spec` reads it back."""
        return {"family": self.FAMILY, **asdict(self)}

    def modules_per_stage(self, layers_per_block: int, imagenet: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
        """How many modules each stage has: n, n, n for CIFAR and Mini-ImageNet, where the depth is 3*layers*n + 2."""
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
    """`found` must be one of the names."""
    if not isinstance(found, str) or found not in known:
        raise unknown_name(name, found, known)


def _unchanging(wiring: Any) -> Any:
    """A wiring as tuples, which nobody can change behind the spec's back."""
    return tuple(map(_unchanging, wiring)) if isinstance(wiring, Sequence) and not isinstance(wiring, str) else wiring
