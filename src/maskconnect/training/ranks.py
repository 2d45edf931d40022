"""Several processes that train one network: who this one is, and what all must agree on.

torchrun tells each process its rank. Every rank has the same weights, masks and random numbers, takes its part of every
batch, and averages its gradients with the others' (torch's DistributedDataParallel does that); so what one rank knows,
all know, and rank 0 alone writes files. Numbers that decide something go through here, on the CPU, by gloo.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, MaskConnectError, ToldElsewhereError
from maskconnect.training.stop import StopRequests

PATIENCE = timedelta(minutes=10)
"""How long to wait for another rank; one whose process has ended is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    count: int = 1
    ours: bool = False  # whether `join` has made the group of processes

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each of the numbers, added up over all ranks."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return list(total.tolist())

    def check(self, requests: StopRequests) -> None:
        """Stop here, all ranks together, if any was asked to."""
        if self.count > 1:
            asked = torch.tensor(requests.asked or 0)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            if not asked:  # a signal that has come meanwhile is for the next time
                return
            requests.asked = int(asked)
        requests.check()

    def gather(self, rows: Tensor) -> list[Tensor]:
        """The rows of every rank, which may be of different number."""
        if self.count == 1:
            return [rows]
        sizes = [int(size) for size in self._gathered(torch.tensor(len(rows)))]
        filled = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
        return [found[:size] for found, size in zip(self._gathered(filled), sizes, strict=True)]

    def gather_plain(self, content: Any) -> list[Any]:
        """Plain data of every rank."""
        own = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        return [json.loads(bytes(each.tolist())) for each in self.gather(own)]

    def _gathered(self, one: Tensor) -> list[Tensor]:
        found = [torch.empty_like(one) for _ in range(self.count)]
        dist.all_gather(found, one.contiguous())
        return found

    def from_first(self, state: Any) -> Any:
        """What rank 0 has, on every rank: plain data and tensors."""
        if self.count == 1:
            return state
        buffer = io.BytesIO()
        if self.first:
            torch.save(state, buffer)
        size = torch.tensor(len(buffer.getbuffer()))
        dist.broadcast(size, 0)
        content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8) if self.first else None
        content = torch.empty(int(size), dtype=torch.uint8) if content is None else content
        dist.broadcast(content, 0)
        return state if self.first else torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)

    def on_first(self, work: Callable[[], Any]) -> Any:
        """What `work` finds on rank 0, which alone does it, on every rank; its error is that of all."""
        if self.count == 1:
            return work()
        found, error = None, None
        if self.first:
            try:
                found = work()
            except (MaskConnectError, OSError) as mistake:
                error = mistake
        found, said = self.from_first((found, None if error is None else str(error)))
        if error is not None:
            raise error
        if said is not None:
            raise ToldElsewhereError(said)
        return found

    def together(self, work: Callable[[], Any]) -> Any:
        """What `work` finds on each rank; if it fails on one it does on all, and the first of those says why."""
        if self.count == 1:
            return work()
        found, error = None, None
        try:
            found = work()
        except (MaskConnectError, OSError) as mistake:
            error = mistake
        failed = [int(each) for each in self._gathered(torch.tensor(int(error is not None)))]
        if error is not None and failed.index(1) == self.rank:
            raise error
        if any(failed):
            raise ToldElsewhereError(f"rank {failed.index(1)} has failed")
        return found

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Make each of the tensors the mean over ranks, in one go."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])

    def check_draws(self, network: nn.Module, when: str) -> list[str]:
        """A checksum of the masks and of what draws them, of each rank; an error if they are not all the same."""
        return self.check_same(digest_of_draws(network), f"{when}: rank {{}} has drawn other masks than rank 0")

    def check_same(self, digest: str, complaint: str) -> list[str]:
        """What every rank has; an error with the rank in the place of {} if one has something else than rank 0."""
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        found = [bytes(each[0].tolist()).hex() for each in self.gather(own[None])]
        for rank, each in enumerate(found):
            if each != found[0]:
                raise MaskConnectError(f"{complaint.format(rank)} (checksums {each} and {found[0]}).")
        return found

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()


def digest_of_plain(content: Any) -> str:
    """Plain data, in sixteen letters."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_weights(network: nn.Module) -> str:
    """Weights and buffers, in sixteen letters."""
    found = hashlib.sha256()
    for tensor in [*network.parameters(), *network.buffers()]:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_draws(network: nn.Module) -> str:
    """Real masks, the binary ones drawn last, and the generators' states, in sixteen letters."""
    found = hashlib.sha256()
    for masks in masks_of(network):
        for tensor in (masks.real.detach(), masks.binary, masks.generator.get_state()):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def join(device: str = "auto") -> Ranks:
    """Meet the other processes that torchrun has started, if it has; each has a GPU of its own, if they have any."""
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    rank, count = (_number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if count == 1:
        return Ranks()
    if not 0 <= rank < count:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {count}; torchrun sets both.")
    if ":" in device:
        raise ConfigError(f"--device is {device}, on {count} ranks; say cuda, and each takes one of its own.")
    gpus, own = torch.cuda.is_available() and device != "cpu", _number("LOCAL_RANK", 0)
    if gpus:
        if own >= torch.cuda.device_count():
            there = torch.cuda.device_count()
            raise ConfigError(f"there are more ranks than GPUs here ({there}); take fewer, or --device cpu.")
        torch.cuda.set_device(own)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    except ValueError as error:  # a variable is missing
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {reason(error)}; torchrun sets all of them.") from None
    return Ranks(rank, count, ours=True)


def leave(ranks: Ranks) -> None:
    """End what `join` has begun."""
    if ranks.ours:
        dist.destroy_process_group()


def averaged(network: nn.Module) -> nn.Module:
    """The network, whose gradients are averaged over ranks as they come; statistics are ours to average."""
    names = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    return DistributedDataParallel(network, **options)


def lost(error: BaseException) -> bool:
    """Whether an error means that another rank has gone."""
    signs = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def reason(error: BaseException) -> str:
    """What a library of communication says, without the place in its source and without advice."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". ")[0].rstrip(".")


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all ranks in the order of the set, of which rank r has every R-th from r on."""
    count, total = len(parts), sum(map(len, parts))
    rows = parts[0].new_empty(total, *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        rows[rank::count] = part
    return rows


def _number(name: str, default: int) -> int:
    found = os.environ.get(name, str(default))
    if not found.isdigit():
        raise ConfigError(f"{name} is {found!r} in the environment; torchrun sets it to a number.")
    return int(found)
