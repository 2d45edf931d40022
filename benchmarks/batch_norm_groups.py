"""Time batch norm over groups of images, relative to a plain one: forward and backward, interleaved in one process.

python benchmarks/batch_norm_groups.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from maskconnect.models.groups import GroupedBatchNorm2d

SHAPES = (((128, 16, 32, 32), 64), ((128, 64, 32, 32), 16))


def seconds(norm: nn.Module, x: Tensor, gradient: Tensor) -> float:
    """Time one forward and backward pass."""
    x.grad = None
    started = time.process_time()
    norm(x).backward(gradient)
    return time.process_time() - started


def ratio(shape: tuple[int, ...], group: int, layout: torch.memory_format, rounds: int = 30) -> float:
    """Return the time of grouped over plain, for the fastest pass of each."""
    x, gradient = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
    x.requires_grad_()
    grouped, plain = GroupedBatchNorm2d(shape[1], group), nn.BatchNorm2d(shape[1])
    times = [(seconds(grouped, x, gradient), seconds(plain, x, gradient)) for _ in range(rounds)]
    return min(first for first, _ in times) / min(second for _, second in times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for shape, group in SHAPES:
        for layout in (torch.contiguous_format, torch.channels_last):
            name = "x".join(map(str, shape))
            print(f"{name}, groups of {group}, {str(layout).removeprefix('torch.')}: {ratio(shape, group, layout):.2f}")
