"""The families of networks: a spec describes a network, and `build` builds it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from maskconnect.errors import ConfigError, unknown_name
from maskconnect.models.blocks import Classifier
from maskconnect.models.branches import save_memory_
from maskconnect.models.mixed import MixedSpec, build_mixed, mixed
from maskconnect.models.resnet import ResNetSpec, build_resnet, resnet
from maskconnect.models.resnext import ResNeXtSpec, build_resnext, resnext
from maskconnect.models.spec import Spec

__all__ = [
    "Classifier",
    "MixedSpec",
    "ResNeXtSpec",
    "ResNetSpec",
    "Spec",
    "build",
    "mixed",
    "read_spec",
    "resnet",
    "resnext",
    "save_memory_",
]

BUILDERS: dict[type[Spec], Callable[[Any], Classifier]] = {
    ResNetSpec: build_resnet,
    ResNeXtSpec: build_resnext,
    MixedSpec: build_mixed,
}
FAMILIES: dict[str, type[Spec]] = {spec.FAMILY: spec for spec in BUILDERS}

RETIRED = ("mask_credit",)
"""Options in networks saved by version 0.1 that a trained network does not need."""


def build(spec: Spec) -> Classifier:
    """Build the network that `spec` describes."""
    if type(spec) not in BUILDERS:
        known = ", ".join(kind.__name__ for kind in BUILDERS)
        raise ConfigError(f"spec is a {type(spec).__name__}; it must be one of {known}.")
    return BUILDERS[type(spec)](spec)


def read_spec(found: Mapping[str, Any]) -> Spec:
    """Return the spec from its description by `spec.describe()`."""
    options = {name: value for name, value in found.items() if name not in RETIRED}
    family = options.pop("family", None)
    if family not in FAMILIES:
        raise unknown_name("the family of networks", family, FAMILIES)
    kind = FAMILIES[family]
    known = {field.name for field in fields(kind)}
    for name in options.keys() ^ known:
        what = "is unknown" if name in options else "is missing"
        raise ConfigError(
            f"{name} {what} in the description of a {family}; use another copy, or the version of maskconnect that "
            "saved it."
        )
    return kind(**options)
