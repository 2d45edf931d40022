"""Running statistics of batch norms: re-estimated for another wiring, restored, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from maskconnect.data.batches import Batches
from maskconnect.models.synced import SyncedBatchNorm2d
from maskconnect.training.options import Machine
from maskconnect.training.predictions import evaluating
from maskconnect.training.ranks import ALONE, Ranks


@torch.no_grad()
def reestimate_(
    network: nn.Module,
    batches: Batches,
    count: int,
    machine: Machine,
    check: Callable[[], None],
    ranks: Ranks = ALONE,
) -> None:
    """Re-estimate the statistics of every batch norm from `count` training batches, with the final wiring (D11)."""
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momentum = [norm.momentum for norm in norms]
    with evaluating(network):
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.train()
                norm.momentum = None  # the plain mean over all batches
            for x, _ in islice(batches.epoch(0), count):
                check()
                with machine.autocast():
                    network(machine.ready(x))
            average_statistics_(network, ranks)
        finally:
            for norm, before in zip(norms, momentum, strict=True):
                norm.momentum = before


@contextmanager
def statistics_kept(network: nn.Module) -> Iterator[None]:
    """Restore batch-norm statistics at the end of this context."""
    kept = [(buffer, buffer.clone()) for buffer in statistics(network)]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def average_statistics_(network: nn.Module, ranks: Ranks) -> None:
    """Replace the running statistics of batch norms by their mean over ranks, each of which normalized its own images.

    Running statistics are linear in the batch statistics, so one process with the same groups gets the same values.
    """
    if ranks.count > 1 and not any(isinstance(part, SyncedBatchNorm2d) for part in network.modules()):
        ranks.average_([buffer for buffer in statistics(network) if buffer.is_floating_point()])


def statistics(network: nn.Module) -> list[Tensor]:
    """Return the running statistics of all batch norms."""
    norms = (part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms for buffer in norm.buffers()]
