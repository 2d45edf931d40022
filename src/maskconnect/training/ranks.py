"""Several processes (ranks) that train one network, and the communication between them.

torchrun tells each process its rank. Every rank has the same weights, masks and random numbers, and processes its part
of every batch; torch's DistributedDataParallel averages gradients. So all ranks have the same state, and only rank 0
writes files. Numbers that decisions depend on are exchanged here, on the CPU, with gloo.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, MaskConnectError, ReportedElsewhereError
from maskconnect.training.stop import StopRequests

PATIENCE = timedelta(minutes=10)
"""The time to wait for another rank; the end of its process is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of ranks."""

    rank: int = 0
    count: int = 1
    ours: bool = False  # whether `join` created the process group

    @property
    def first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return each number, summed over all ranks."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return list(total.tolist())

    def check(self, requests: StopRequests) -> None:
        """Raise `Stopped` on all ranks if any of them was asked to stop."""
        if self.count > 1:
            asked = torch.tensor(requests.asked or 0)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            if not asked:  # the next check handles a signal that arrives now
                return
            requests.asked = int(asked)
        requests.check()

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of every rank; ranks may have different numbers of rows."""
        if self.count == 1:
            return [rows]
        sizes = [int(size) for size in self._gathered(torch.tensor(len(rows)))]
        filled = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
        return [found[:size] for found, size in zip(self._gathered(filled), sizes, strict=True)]

    def gather_plain(self, content: Any) -> list[Any]:
        """Return the plain data of every rank."""
        own = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        return [json.loads(bytes(each.tolist())) for each in self.gather(own)]

    def _gathered(self, one: Tensor) -> list[Tensor]:
        found = [torch.empty_like(one) for _ in range(self.count)]
        dist.all_gather(found, one.contiguous())
        return found

    def from_first(self, state: Any) -> Any:
        """Return on every rank what rank 0 passes: plain data and tensors."""
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
        """Run `work` on rank 0 only, and return its result on every rank; an error is raised on all ranks."""
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
            raise ReportedElsewhereError(said)
        return found

    def together(self, work: Callable[[], Any]) -> Any:
        """Run `work` on each rank; if it fails on one, all fail, and the first of the failed ranks says why."""
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
            raise ReportedElsewhereError(f"rank {failed.index(1)} failed")
        return found

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over ranks, with a single reduction."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])

    def check_draws(self, network: nn.Module, when: str) -> list[str]:
        """Return the checksum of masks and generators of each rank; an error if they differ."""
        return self.check_same(
            digest_of_draws(network),
            f"{when}: rank {{}} drew different masks than rank 0",
            "Restart all ranks from the last checkpoint.",
        )

    def check_same(self, digest: str, complaint: str, remedy: str) -> list[str]:
        """Return the digest of every rank; an error, with the rank in the place of {}, if one differs from rank 0."""
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        found = [bytes(each[0].tolist()).hex() for each in self.gather(own[None])]
        for rank, each in enumerate(found):
            if each != found[0]:
                raise MaskConnectError(f"{complaint.format(rank)} (checksums {each} and {found[0]}). {remedy}")
        return found

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()


def digest_of_plain(content: Any) -> str:
    """Return a checksum of plain data, in 16 characters."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_weights(network: nn.Module) -> str:
    """Return a checksum of weights and buffers, in 16 characters."""
    found = hashlib.sha256()
    for tensor in [*network.parameters(), *network.buffers()]:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_draws(network: nn.Module) -> str:
    """Return a checksum of real masks, the last binary masks and generator states, in 16 characters."""
    found = hashlib.sha256()
    for masks in masks_of(network):
        for tensor in (masks.real.detach(), masks.binary, masks.generator.get_state()):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def join(device: str = "auto") -> Ranks:
    """Join the other processes of torchrun, if there are any; each uses its own GPU, if there are GPUs."""
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    rank, count = (_number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if count == 1:
        return Ranks()
    if not 0 <= rank < count:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE is {count}; RANK must be from 0 to {count - 1}. Launch with torchrun."
        )
    if ":" in device:
        raise ConfigError(
            f"--device is {device} with {count} ranks; use --device cuda, and each rank takes its own GPU."
        )
    gpus, own = torch.cuda.is_available() and device != "cpu", _number("LOCAL_RANK", 0)
    if gpus:
        if own >= torch.cuda.device_count():
            there = torch.cuda.device_count()
            raise ConfigError(
                f"this machine has {there} GPUs and at least {own + 1} ranks; use fewer ranks, or --device cpu."
            )
        torch.cuda.set_device(own)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    except ValueError as error:  # a variable is missing
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but {reason(error)}; launch with torchrun, which sets all variables."
        ) from None
    return Ranks(rank, count, ours=True)


def leave(ranks: Ranks) -> None:
    """Leave the process group that `join` created."""
    if ranks.ours:
        dist.destroy_process_group()


def averaged(network: nn.Module) -> nn.Module:
    """Return the network wrapped so that gradients are averaged over ranks; batch-norm statistics are not.

    After its first step torch's wrapper adds gradients in another order, so a resumed run would round differently than
    one that never stopped. Between two ranks the order makes no difference. With more, looking for unused parameters
    (there are none) keeps the order.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    if dist.get_world_size() > 2:
        options["find_unused_parameters"] = True
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(network, **options)


def lost(error: BaseException) -> bool:
    """Return whether an error means that another rank has stopped."""
    signs = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def reason(error: BaseException) -> str:
    """Return the message of a communication library, without source location and advice."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". ")[0].rstrip(".")


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all R ranks in the order of the set; rank r has rows r, r + R, r + 2R, ..."""
    count, total = len(parts), sum(map(len, parts))
    rows = parts[0].new_empty(total, *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        rows[rank::count] = part
    return rows


def _number(name: str, default: int) -> int:
    found = os.environ.get(name, str(default))
    if not found.isdigit():
        raise ConfigError(
            f"{name} is {found!r} in the environment; it must be a number. Launch with torchrun, which sets it."
        )
    return int(found)
