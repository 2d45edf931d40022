"""A stack in the place of one or several lists of blocks of a model, which runs the blocks itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from maskconnect.core.stack import MaskedStack
from maskconnect.retrofit.named import KeepsNames
from maskconnect.retrofit.taps import TapList
from maskconnect.retrofit.walker import Walker


class TapSection(TapList):
    """The second list of a chain over several lists, or a further one; the first has the masks."""


def sections_of(first: TapList, walker: Walker, containers: Sequence[nn.Module]) -> list[TapList]:
    """The lists of one chain, the `first` with all that the chain is, in the places of containers."""
    sections = [first, *(TapSection() for _ in containers[1:])]
    number = 0
    for section, container in zip(sections, containers, strict=True):
        section.hold_(container, walker, number)
        number += len(container._modules)
    return sections


class TappedStack(TapList, KeepsNames, Walker):
    """A stack that is also the first list of its blocks."""

    runs_its_modules = False  # the model does

    def __init__(self, containers: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
        blocks = [block for container in containers for block in container._modules.values()]
        MaskedStack.__init__(self, blocks, *args, **kwargs)  # type: ignore[arg-type]
        del self._modules["blocks"]
        self.start_walking()
        self._prev = self.layout.prev()
        self._sections = sections_of(self, self, containers)

    @property
    def sections(self) -> list[TapList]:
        """The lists of the chain, this one first."""
        return self._sections

    def flat(self) -> list[nn.Module]:
        """All blocks, in the order in which they run."""
        return [block for section in self._sections for block in section.blocks_here()]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Where each block is registered: in which module, under which name."""
        return [(section, name) for section in self._sections for name in section._block_names]

    def hooked(self) -> list[int]:
        """The blocks with forward hooks, such as those by which transformers collects hidden states."""
        return [number for number, block in enumerate(self.flat()) if any(map(_asks, block._forward_hooks.values()))]

    def reads_prev(self) -> bool:
        """Whether every block reads the one before it, as the model had it."""
        fixed = self.masks.fixed
        return fixed is not None and fixed.sources == self._prev

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TappedStack:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if recurse:
            self.masks._apply(fn)  # the children are taps
        return self


def _asks(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook may be there for the output; those of FSDP are for the weights."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
