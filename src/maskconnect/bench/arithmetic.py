"""Count what a training step computes, moves and holds, operation by operation, without computing anything.

On the meta device tensors have shapes and no numbers, so that a step of any network can be counted on any machine.

    FLOPs       of convolutions, matrix products and attention, two for a multiply-accumulate
    traffic     bytes that operations read and write, each tensor once per operation; data in a cache counts too
    peak        bytes of all tensors that are alive at once, weights and gradients and images among them
    operations  how many torch launches, below autograd; views and empty allocations do not count
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import baddbmm_flop, flop_registry

FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Operations that read only a shape; operations that return empty memory write nothing either."""


aten = torch.ops.aten
AS_ON_GPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Operations of the CPU whose FLOPs torch counts on GPUs only."""


@dataclass
class Arithmetic:
    """The counts of one step."""

    flops: int = 0
    traffic: int = 0
    peak: int = 0
    operations: int = 0

    def describe(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return asdict(self)


@dataclass
class _Counter(TorchDispatchMode):
    """Counts every operation below autograd."""

    found: Arithmetic = field(default_factory=Arithmetic)
    alive: dict[int, int] = field(default_factory=dict)  # the bytes of every storage, by its id
    total: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.total += storage.nbytes()
        self.found.peak = max(self.found.peak, self.total)
        weakref.finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        """Subtract the memory of a storage that was freed."""
        self.total -= self.alive.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not func.is_view:
            before = {id(tensor) for tensor in read}
            new = [y for y in made if id(y) not in before]
            name = func._overloadpacket.__name__
            if "empty" not in name:
                self.found.operations += bool(read or made)  # torch.promote_types, for example, has no tensors
                self.found.traffic += sum(map(_bytes, new if name in FILLED else (*read, *new)))
            self.found.flops += _flops(func, args, kwargs, out)
        for tensor in (*read, *made):
            self.hold(tensor)
        return out


def count(step: Callable[[], None]) -> Arithmetic:
    """Count what a step computes, moves and holds. A step before it creates lasting state, such as the optimizer's."""
    step()
    counter = _Counter()
    with counter:
        step()
    return counter.found


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that it takes to read a tensor; an expanded one has only those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if packet is aten.convolution_backward:  # torch's own formula ignores groups
        dy, _, weight, *_, (wants_dx, wants_dw, _) = args
        return int(2 * dy.numel() * weight[0].numel() * (wants_dx + wants_dw))
    if packet is aten.baddbmm_:
        return int(baddbmm_flop(*(arg.shape for arg in args)))
    counted = flop_registry.get(AS_ON_GPU.get(packet, packet))
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))
