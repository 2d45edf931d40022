"""Predictions of a network for a set, in eval mode: with frozen masks, the top-K, or drawn masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskconnect.core.lookup import masks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.data.batches import Batches
from maskconnect.training.options import Machine
from maskconnect.training.ranks import ALONE, Ranks, interleaved

TOP = 5


@dataclass(frozen=True)
class Scores:
    """The mean loss, and the percentage of images whose class is the most likely one, or among the five most likely."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True, eq=False)
class Predictions:
    """The most likely classes of each image, best first. Shape letters: N images, R ranks (five, or all classes)."""

    label_N: Tensor
    class_NR: Tensor
    probability_NR: Tensor
    loss_N: Tensor

    def scores(self) -> Scores:
        """Return the mean loss and the accuracies."""
        hit_NR = self.class_NR == self.label_N[:, None]
        top1, top5 = (100 * int(hit_NR[:, :k].sum()) / len(hit_NR) for k in (1, TOP))
        return Scores(float(self.loss_N.double().mean()), top1, top5)


@torch.inference_mode()
def predict(
    network: nn.Module, batches: Batches, machine: Machine, check: Callable[[], None], ranks: Ranks = ALONE
) -> Predictions:
    """Run a network over a set; `check` is called before each batch and may raise.

    Each rank processes its part of every batch, and gets the predictions of all ranks, in order.
    """
    rows: list[tuple[Tensor, ...]] = []
    with evaluating(network):
        for x, y in batches.epoch(0):
            check()
            scores = x.new_zeros(0, len(batches.images.classes))
            if len(x):  # a rank may have no images of the last batch
                with machine.autocast():
                    scores = network(machine.ready(x))
            scores = scores.float()
            probability, best = scores.softmax(dim=1).topk(min(TOP, scores.shape[1]))
            rows.append((y, best, probability, F.cross_entropy(scores, y, reduction="none")))
    own = (torch.cat(column).cpu() for column in zip(*rows, strict=True))
    return Predictions(*(interleaved(ranks.gather(column)) for column in own))


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and restore the mode of every module afterwards."""
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def drawing(network: nn.Module) -> Iterator[None]:
    """Let stacks draw masks while the rest of the network is in eval mode, and restore their state afterwards."""
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
    stack.training = True  # only its own flag: its modules stay in eval mode
