"""What all families say of a network, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from maskconnect.errors import ConfigError, integer, unknown_name
from maskconnect.models.blocks import STEMS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The part of a description that is the same for every family. `connectivity` is that of `mc.MaskedStack`."""

    FAMILY: ClassVar[str]
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
            positive(name, getattr(self, name))
        one_of("stem", self.stem, STEMS)
        one_of("aggregation", self.aggregation, self.AGGREGATIONS)
        object.__setattr__(self, "connectivity", _unchanging(self.connectivity))

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


def positive(name: str, found: object) -> None:
    """`found` must be an integer of 1 or more."""
    if integer(name, found) < 1:
        raise ConfigError(f"{name} is {found}; it must be 1 or more.")
