"""Learn, by gradient descent and together with the weights, which modules of a network feed which others.

An implementation of "MaskConnect: Connectivity Learning by Gradient Descent" (ECCV 2018).
"""

import importlib
from typing import TYPE_CHECKING, Any

from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError, DataError, MaskConnectError

if TYPE_CHECKING:
    from maskconnect.core.count import count_parameters
    from maskconnect.core.loop import attach, freeze, param_groups, wiring_of
    from maskconnect.core.prune import prune
    from maskconnect.core.reference import reference
    from maskconnect.core.residual import Residual
    from maskconnect.core.rewire import rewire
    from maskconnect.core.stack import MaskedStack
    from maskconnect.models import resnet, resnext
    from maskconnect.report.draw import draw
    from maskconnect.ship.saved import load, save

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConnectivityError",
    "DataError",
    "MaskConnectError",
    "MaskedStack",
    "Residual",
    "attach",
    "count_parameters",
    "draw",
    "freeze",
    "load",
    "param_groups",
    "prune",
    "reference",
    "resnet",
    "resnext",
    "rewire",
    "save",
    "wiring_of",
]

_PLACES = {
    "MaskedStack": "core.stack",
    "Residual": "core.residual",
    "attach": "core.loop",
    "count_parameters": "core.count",
    "draw": "report.draw",
    "freeze": "core.loop",
    "load": "ship.saved",
    "param_groups": "core.loop",
    "prune": "core.prune",
    "reference": "core.reference",
    "resnet": "models",
    "resnext": "models",
    "rewire": "core.rewire",
    "save": "ship.saved",
    "wiring_of": "core.loop",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: the command line should not wait for torch to say --help."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
