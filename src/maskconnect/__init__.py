"""Learn, by gradient descent and together with the weights, which modules of a network feed which others.

An implementation of "MaskConnect: Connectivity Learning by Gradient Descent" (ECCV 2018).
"""

from maskconnect.core.loop import attach, freeze, param_groups, wiring_of
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError, MaskConnectError

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConnectivityError",
    "MaskConnectError",
    "MaskedStack",
    "attach",
    "freeze",
    "param_groups",
    "wiring_of",
]
