"""The networks of the paper: a description (a spec) a family, and `build`, which makes the network of any."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from maskconnect.errors import ConfigError, unknown_name
from maskconnect.models.blocks import Classifier
from maskconnect.models.branches import save_memory_
from maskconnect.models.resnet import ResNetSpec, build_resnet, resnet
from maskconnect.models.resnext import ResNeXtSpec, build_resnext, resnext

__all__ = ["Classifier", "ResNeXtSpec", "ResNetSpec", "build", "read_spec", "resnet", "resnext", "save_memory_"]

FAMILIES: dict[str, type[ResNetSpec] | type[ResNeXtSpec]] = {spec.FAMILY: spec for spec in (ResNetSpec, ResNeXtSpec)}

RETIRED = ("mask_credit",)
"""Options of networks that version 0.1 saved; a trained network does not need them."""


def build(spec: ResNetSpec | ResNeXtSpec) -> Classifier:
    """The network that `spec` describes."""
    if isinstance(spec, ResNetSpec):
        return build_resnet(spec)
    if isinstance(spec, ResNeXtSpec):
        return build_resnext(spec)
    raise ConfigError(f"spec is a {type(spec).__name__}; it must be one of ResNetSpec, ResNeXtSpec.")


def read_spec(found: Mapping[str, Any]) -> ResNetSpec | ResNeXtSpec:
    """The spec that `spec.describe()` described."""
    options = {name: value for name, value in found.items() if name not in RETIRED}
    family = options.pop("family", None)
    if family not in FAMILIES:
        raise unknown_name("the family of networks", family, FAMILIES)
    kind = FAMILIES[family]
    known = {field.name for field in fields(kind)}
    for name in options.keys() ^ known:
        what = "is not known" if name in options else "is missing"
        raise ConfigError(f"{name} {what} in the description of a {family}.")
    return kind(**options)
