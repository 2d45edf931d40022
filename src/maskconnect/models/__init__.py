"""The networks of the paper: a description (a spec) a family, and `build`, which makes the network of any."""

from maskconnect.errors import ConfigError
from maskconnect.models.blocks import Classifier
from maskconnect.models.resnet import ResNetSpec, build_resnet, resnet
from maskconnect.models.resnext import ResNeXtSpec, build_resnext, resnext

__all__ = ["Classifier", "ResNeXtSpec", "ResNetSpec", "build", "resnet", "resnext"]


def build(spec: ResNetSpec | ResNeXtSpec) -> Classifier:
    """The network that `spec` describes."""
    if isinstance(spec, ResNetSpec):
        return build_resnet(spec)
    if isinstance(spec, ResNeXtSpec):
        return build_resnext(spec)
    raise ConfigError(f"spec is a {type(spec).__name__}; it must be one of ResNetSpec, ResNeXtSpec.")
