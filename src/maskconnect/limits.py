"""How large things may be that a file or a caller asks for. What is larger is refused before any work is done."""

from __future__ import annotations

from maskconnect.errors import ConfigError, integer, shown

COUNT = 2**31 - 1
"""The limit of a number that has none of its own."""

SIDE = 16_384
"""How many pixels a side of a picture may have."""

LIMITS = {
    **{"depth": 10_000, "width": SIDE, "cardinality": 4_096, "num_classes": 1_000_000, "in_channels": 65_536},
    **{"size": SIDE, "pad": SIDE, "raw": SIDE, "shrink": SIDE, "shorter": SIDE, "test_shorter": SIDE},
    "epochs": 1_000_000,
}
"""The largest value of a field, by its name."""

MODULES = 4_096
"""How many modules a network may have; ResNeXt-152 of 64 branches has 3,200."""

CONNECTIONS = 2_000_000
"""How many connections a network may learn; ResNet-1202 has 179,700."""


def at_most(name: str, found: int) -> int:
    """`found`, or the error if it is beyond the limit of the field that `name` ends with."""
    most = LIMITS.get(name.rpartition(".")[2], COUNT)
    if found > most:
        raise ConfigError(f"{name} is {shown(found)}; that is beyond {most:,}, and surely not meant.")
    return found


def within(name: str, found: object, *, least: int = 1) -> int:
    """`found` as an integer from `least` up to the limit of its field, or the error that names it."""
    number = integer(name, found)
    if number < least:
        raise ConfigError(f"{name} is {shown(found)}; it must be {least} or more.")
    return at_most(name, number)
