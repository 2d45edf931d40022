"""Step 1 of Algorithm 1 as custom operators of torch, which a compiler calls and does not trace.

A draw depends on a generator, on the options of learning and on its progress. All of these stay outside the graph, so
one compiled graph serves every step. Operators take only tensors and numbers, so a handle identifies the masks.

Shape letters: T targets, S candidate sources.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from maskconnect.core.replay import backward_pass
from maskconnect.errors import ConnectivityError

if TYPE_CHECKING:
    from maskconnect.core.masks import ConnectivityMasks

_handles = count(1)
_masks: WeakValueDictionary[int, ConnectivityMasks] = WeakValueDictionary()
"""All masks of this process, by handle."""


def handle_for(masks: ConnectivityMasks) -> int:
    """Return a number by which operators find these masks while they exist."""
    handle = next(_handles)
    _masks[handle] = masks
    return handle


@torch.library.custom_op(
    "maskconnect::draw",
    mutates_args=("real_TS", "binary_TS"),
    schema="(Tensor(a!) real_TS, Tensor(b!) binary_TS, int handle) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def draw(real_TS: Tensor, binary_TS: Tensor, handle: int) -> Tensor:
    """Return what the next pass reads; real masks are normalized and binary masks written in place."""
    if backward_pass() is not None:
        raise ConnectivityError(
            "a compiled stack that learns was run again during a backward pass, and would draw other masks. Checkpoint "
            "the modules inside the stack, or do not compile it."
        )
    return _masks[handle].draw_from_(real_TS, binary_TS).mask_TS.to(real_TS, copy=True)


@torch.library.custom_op(
    "maskconnect::top",
    mutates_args=(),
    schema="(Tensor real_TS, int handle) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def top(real_TS: Tensor, handle: int) -> Tensor:
    """Return the top-K of the real masks, as in eval mode."""
    masks = _masks[handle]
    return masks.top(masks.on_host(real_TS)).mask_TS.to(real_TS, copy=True)


@draw.register_fake
def _(real_TS: Tensor, binary_TS: Tensor, handle: int) -> Tensor:
    return torch.empty_like(real_TS)


@top.register_fake
def _(real_TS: Tensor, handle: int) -> Tensor:
    return torch.empty_like(real_TS)
