"""The forms of a training step that are tried before it is timed: memory formats, and kinds of torch's SGD.

All forms of a network compute the same. The fastest one depends on the machine and the batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
SGDS = {"foreach": {"foreach": True}, "fused": {"fused": True}}
"""Each updates all weights at once; torch's default on a CPU, a loop over the weights, is slower than either."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to run the same training step."""

    layout: str | None = "channels first"  # of images and weights; None for sequences
    sgd: str = "foreach"

    def __str__(self) -> str:
        return self.sgd if self.layout is None else f"{self.layout}, {self.sgd}"

    def optimizer(self, groups: Any) -> torch.optim.SGD:
        """Return SGD with momentum and weight decay."""
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4, **SGDS[self.sgd])

    def network(self, network: nn.Module) -> nn.Module:
        """Change the weights to this layout in place, and return the network."""
        if self.layout is not None:
            network.to(memory_format=LAYOUTS[self.layout])  # type: ignore[call-overload]
        return network

    def images(self, x: Tensor) -> Tensor:
        """Return the images in this layout."""
        return x if self.layout is None else x.contiguous(memory_format=LAYOUTS[self.layout])


OF_CONVOLUTIONS = tuple(Form(layout=layout, sgd=sgd) for layout in LAYOUTS for sgd in SGDS)
OF_SEQUENCES = tuple(Form(layout=None, sgd=sgd) for sgd in SGDS)
COUNTED = Form()
"""The form for counting operations, the same for all networks; the meta device has no fused SGD."""
