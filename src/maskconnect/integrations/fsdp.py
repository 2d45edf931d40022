"""FSDP2 (torch's `fully_shard`) for models with masks.

    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=0.03))  # after: sharding replaces parameters
    mc.attach(optimizer, model)

Weights are sharded. Masks are small, and every process draws from all of them, so each process keeps them whole: their
gradients are averaged, and all processes make the same update.

torch's clip_grad_norm_ does not take sharded and whole gradients together: clip `optimizer.param_groups[0]["params"]`.
Load a checkpoint before you call `mc.attach`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from maskconnect.core.lookup import masks_of, stacks_of


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard a model with masks in place: each module of its stacks by itself, then the rest.

    Args:
        model: a model with masks, the same on every process.
        options: those of `fully_shard`: `mesh`, `reshard_after_forward`, `mp_policy` and so on.
    """
    ignored = real_masks(model) | options.pop("ignored_params", set())
    blocks = [block for _, stack in reversed(stacks_of(model)) for block in stack.flat()]  # inner stacks first
    for block in dict.fromkeys(blocks):
        fully_shard(block, ignored_params=ignored, **options)
    fully_shard(model, ignored_params=ignored, **options)
    average_masks(model, options.get("mesh"))
    return model


def real_masks(model: nn.Module) -> set[nn.Parameter]:
    """Return the `ignored_params` for your own calls of `fully_shard`."""
    return {masks.real for masks in masks_of(model)}


def average_masks(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Average the gradients of the masks over all processes, or those of a mesh, in every backward pass.

    Averaging gradients a second time does not change them, so parts of a batch may be accumulated.
    """
    groups = [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]

    def average(real: Tensor) -> None:
        assert real.grad is not None
        for group in groups:
            dist.all_reduce(real.grad, group=group)
            real.grad /= dist.get_world_size(group)

    for masks in masks_of(model):
        if masks.real.requires_grad:
            masks.real.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
