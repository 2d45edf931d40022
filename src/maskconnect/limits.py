"""Upper limits for the sizes that a file or a caller asks for. Larger values are rejected before any work is done."""

from __future__ import annotations

from maskconnect.errors import ConfigError, integer, shown

COUNT = 2**31 - 1
"""The limit for numbers without a specific limit."""

SIDE = 16_384
"""The largest number of pixels per side of an image."""

LIMITS = {
    **{"depth": 10_000, "width": SIDE, "cardinality": 4_096, "num_classes": 1_000_000, "in_channels": 65_536},
    **{"size": SIDE, "pad": SIDE, "raw": SIDE, "shrink": SIDE, "shorter": SIDE, "test_shorter": SIDE},
    "epochs": 1_000_000,
}
"""The largest value of each field, by field name."""

MODULES = 4_096
"""The largest number of modules in a network; ResNeXt-152 with 64 branches has 3,200."""

CONNECTIONS = 2_000_000
"""The largest number of learned connections in a network; ResNet-1202 has 179,700."""


def at_most(name: str, found: int) -> int:
    """Return `found`, or raise a ConfigError if it exceeds the limit of the field at the end of `name`."""
    most = LIMITS.get(name.rpartition(".")[2], COUNT)
    if found > most:
        raise ConfigError(f"{name} is {shown(found)}; it must be at most {most:,}.")
    return found


def within(name: str, found: object, *, least: int = 1) -> int:
    """Return `found` as an integer between `least` and the limit of its field, or raise a ConfigError."""
    number = integer(name, found)
    if number < least:
        raise ConfigError(f"{name} is {shown(found)}; it must be {least} or more.")
    return at_most(name, number)
