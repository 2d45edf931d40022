"""The gradients of one training step (Algorithm 1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from maskconnect.errors import ConfigError
from maskconnect.training.options import Machine
from maskconnect.training.ranks import ALONE, Ranks


class Step(NamedTuple):
    """The results of a step."""

    loss: float
    correct: int
    images: int
    gradient: float  # the norm of all gradients, scaled if there is a scaler


def gradients(
    network: nn.Module,
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
    *,
    parts: int,
    machine: Machine,
    scaler: GradScaler | None = None,
    ranks: Ranks = ALONE,
    images: int | None = None,
) -> Step:
    """Run the forward and backward pass of one batch, in `parts`; each part draws its own masks.

    `images` is the number of images in the batch on all ranks; x and y are those of this rank.
    """
    optimizer.zero_grad(set_to_none=True)
    images = len(y) if images is None else images
    parts = min(parts, images // ranks.count)
    total, correct = x.new_zeros((), dtype=torch.float64), y.new_zeros(())
    for part in parts_of(images, parts, ranks):
        x_part, y_part = x[part], y[part]
        last = part.stop == len(y)
        with network.no_sync() if isinstance(network, DistributedDataParallel) and not last else nullcontext():
            with machine.autocast(), single_value_explained(len(y)):
                scores = network(machine.ready(x_part))
            share = len(y_part) * ranks.count / images  # gradients are averaged, and parts may differ in size
            loss = F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), y_part) * share
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        correct += (scores.detach().argmax(dim=1) == y_part).sum()
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    loss_of_all, correct_of_all = ranks.sum(float(total) / ranks.count, int(correct))
    return Step(loss=loss_of_all, correct=int(correct_of_all), images=images, gradient=float(get_total_norm(grads)))


def parts_of(images: int, parts: int, ranks: Ranks = ALONE) -> list[slice]:
    """Split a batch into parts of similar size, and return this rank's slices: it has images rank, rank + ranks, ..."""
    ends = [number * (images // parts) + min(number, images % parts) for number in range(parts + 1)]
    own = [-(-(end - ranks.rank) // ranks.count) if end > ranks.rank else 0 for end in ends]
    return [slice(first, end) for first, end in itertools.pairwise(own)]


@contextmanager
def single_value_explained(images: int) -> Iterator[None]:
    """Add to torch's error about a batch norm over a single value what to do about it."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"a batch norm sees a single value per channel in a batch of {images}; it needs at least 2. Change "
            "training.batch_size (so that the last batch of an epoch is larger), training.accumulate or "
            "training.norm_group."
        ) from None


@contextmanager
def compiler_errors_explained() -> Iterator[None]:
    """Turn errors of torch.compile, such as a missing C++ compiler, into one sentence for the user."""
    from torch._dynamo.exc import TorchDynamoException  # here, because importing it takes a second

    try:
        yield
    except TorchDynamoException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the network cannot be compiled here: {reason}; remove --compile.") from None
