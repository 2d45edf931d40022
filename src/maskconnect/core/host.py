"""Copies from the host to the device of a network that wait for nothing, where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

STAGED = frozenset({"cuda"})
"""Devices whose copies have taken the values when the call returns; others, such as MPS, may read the host later."""


def copy_from_host_(y: Tensor, x: Tensor) -> Tensor:
    """Copy x, a tensor on the host, into y."""
    return y.copy_(x, non_blocking=y.device.type in STAGED)


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x, a tensor on the host, on this device."""
    device = torch.device(device)
    return x if x.device == device else copy_from_host_(torch.empty_like(x, device=device), x)
