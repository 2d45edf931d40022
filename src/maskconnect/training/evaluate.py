"""How good a network is: top-1 and top-5 on a set, in eval mode, where masks are the frozen ones or the top-K."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.loop import masks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.data.batches import Batches
from maskconnect.models.synced import SyncedBatchNorm2d
from maskconnect.training.options import Machine
from maskconnect.training.ranks import ALONE, Ranks, interleaved

TOP = 5


@dataclass(frozen=True)
class Scores:
    """Mean loss, and the share of images (in %) whose class is the first, or among the first five."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True, eq=False)
class Predictions:
    """The likeliest classes of each image, best first. Shape letters: N images, R ranks (five, or all classes)."""

    label_N: Tensor
    class_NR: Tensor
    probability_NR: Tensor
    loss_N: Tensor

    def scores(self) -> Scores:
        """What they come to."""
        hit_NR = self.class_NR == self.label_N[:, None]
        top1, top5 = (100 * int(hit_NR[:, :k].sum()) / len(hit_NR) for k in (1, TOP))
        return Scores(float(self.loss_N.double().mean()), top1, top5)


@torch.inference_mode()
def predict(
    network: nn.Module, batches: Batches, machine: Machine, check: Callable[[], None], ranks: Ranks = ALONE
) -> Predictions:
    """Run a network over a set; `check` is called before each batch and may raise.

    Each rank has its part of every batch, and gets the predictions of all, in order.
    """
    rows: list[tuple[Tensor, ...]] = []
    with evaluating(network):
        for x, y in batches.epoch(0):
            check()
            scores = x.new_zeros(0, len(batches.images.classes))
            if len(x):  # a rank may have none of the last batch
                with machine.autocast():
                    scores = network(machine.ready(x))
            scores = scores.float()
            probability, best = scores.softmax(dim=1).topk(min(TOP, scores.shape[1]))
            rows.append((y, best, probability, F.cross_entropy(scores, y, reduction="none")))
    own = (torch.cat(column).cpu() for column in zip(*rows, strict=True))
    return Predictions(*(interleaved(ranks.gather(column)) for column in own))


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Eval mode, and back to how every part was before."""
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def drawing(network: nn.Module) -> Iterator[None]:
    """Let stacks draw their masks even where the rest of the network is in eval mode; the draws leave no trace."""
    learned = [masks for masks in masks_of(network) if not masks.is_frozen]
    before = [(masks, masks.real.detach().clone(), masks.generator.get_state()) for masks in learned]
    handles = [s.register_forward_pre_hook(_set_training) for s in network.modules() if isinstance(s, MaskedStack)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for masks, real, state in before:
            masks.real.data.copy_(real)
            masks.generator.set_state(state)


def _set_training(stack: nn.Module, _: object) -> None:
    stack.training = True  # its own flag alone: the modules in it stay in eval mode


@torch.no_grad()
def reestimate_(
    network: nn.Module,
    batches: Batches,
    count: int,
    machine: Machine,
    check: Callable[[], None],
    ranks: Ranks = ALONE,
) -> None:
    """Find the statistics of every batch norm anew, by `count` training batches through the settled wiring (D11)."""
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
    """Whatever happens to batch-norm statistics in this context is undone after it."""
    kept = [(buffer, buffer.clone()) for buffer in statistics(network)]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def average_statistics_(network: nn.Module, ranks: Ranks) -> None:
    """Make the running statistics of batch norms the mean over ranks, each of which has normed its part of a batch.

    As they move in proportion to what is seen, that is what one process has that norms the same parts as groups.
    """
    if ranks.count > 1 and not any(isinstance(part, SyncedBatchNorm2d) for part in network.modules()):
        ranks.average_([buffer for buffer in statistics(network) if buffer.is_floating_point()])


def statistics(network: nn.Module) -> list[Tensor]:
    """The running statistics of all batch norms."""
    norms = (part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms for buffer in norm.buffers()]
