"""Learn which modules of a network feed which others, by gradient descent and together with the weights.

An implementation of "MaskConnect: Connectivity Learning by Gradient Descent" (ECCV 2018).
"""

import importlib
from typing import TYPE_CHECKING, Any

from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError, DataError, MaskConnectError

if TYPE_CHECKING:
    from maskconnect.core.blend import Blend
    from maskconnect.core.count import count_parameters
    from maskconnect.core.draw import Draw
    from maskconnect.core.lookup import freeze, wiring_of
    from maskconnect.core.metrics import metrics
    from maskconnect.core.optim import attach, param_groups
    from maskconnect.core.reference import reference
    from maskconnect.core.residual import Residual
    from maskconnect.core.stack import MaskedStack
    from maskconnect.models import mixed, resnet, resnext
    from maskconnect.pruning.prune import prune
    from maskconnect.report.drawing import draw
    from maskconnect.report.recorder import Recorder
    from maskconnect.retrofit.rewire import rewire
    from maskconnect.ship.saved import load, save

__version__ = "0.1.0"

__all__ = [
    "Blend",
    "CheckpointError",
    "ConfigError",
    "ConnectivityError",
    "DataError",
    "Draw",
    "MaskConnectError",
    "MaskedStack",
    "Recorder",
    "Residual",
    "attach",
    "count_parameters",
    "draw",
    "freeze",
    "load",
    "metrics",
    "mixed",
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
    "Blend": "core.blend",
    "Draw": "core.draw",
    "MaskedStack": "core.stack",
    "Recorder": "report.recorder",
    "Residual": "core.residual",
    "attach": "core.optim",
    "count_parameters": "core.count",
    "draw": "report.drawing",
    "freeze": "core.lookup",
    "load": "ship.saved",
    "metrics": "core.metrics",
    "mixed": "models",
    "param_groups": "core.optim",
    "prune": "pruning.prune",
    "reference": "core.reference",
    "resnet": "models",
    "resnext": "models",
    "rewire": "retrofit.rewire",
    "save": "ship.saved",
    "wiring_of": "core.lookup",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `maskconnect --help` does not wait for torch."""
    if name == "integrations":
        return importlib.import_module(f"{__name__}.integrations")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
