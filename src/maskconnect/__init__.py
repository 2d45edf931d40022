"""Learn, by gradient descent and together with the weights, which modules of a network feed which others.

An implementation of "MaskConnect: Connectivity Learning by Gradient Descent" (ECCV 2018).
"""

from maskconnect.core.count import count_parameters
from maskconnect.core.loop import attach, freeze, param_groups, wiring_of
from maskconnect.core.prune import prune
from maskconnect.core.rewire import rewire
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError, DataError, MaskConnectError
from maskconnect.models import resnet, resnext
from maskconnect.ship.saved import load, save

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConnectivityError",
    "DataError",
    "MaskConnectError",
    "MaskedStack",
    "attach",
    "count_parameters",
    "freeze",
    "load",
    "param_groups",
    "prune",
    "resnet",
    "resnext",
    "rewire",
    "save",
    "wiring_of",
]
