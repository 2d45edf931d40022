"""A stack in place of one or several lists of blocks in a model; the model itself calls the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from maskconnect.core.stack import MaskedStack
from maskconnect.retrofit.named import KeepsNames
from maskconnect.retrofit.taps import TapList
from maskconnect.retrofit.walker import Walker


class TapSection(TapList):
    """A list of a chain of several lists, other than the first, which has the masks."""


def sections_of(first: TapList, walker: Walker, containers: Sequence[nn.Module]) -> list[TapList]:
    """Return the lists of one chain, which replace `containers`; `first` holds the state of the chain."""
    sections = [first, *(TapSection() for _ in containers[1:])]
    number = 0
    for section, container in zip(sections, containers, strict=True):
        section.take_place_of_(container, walker, number)
        number += len(container._modules)
    return sections


class TappedStack(TapList, KeepsNames, Walker):
    """A stack that is also the first list of its blocks."""

    runs_its_modules = False  # the model calls them

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
        """Return all blocks in the order in which they run."""
        return [block for section in self._sections for block in section.blocks_here()]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Return the parent module and the name under which each block is registered."""
        return [(section, name) for section in self._sections for name in section._block_names]

    def hooked(self) -> list[int]:
        """Return the blocks with forward hooks, such as those with which transformers collects hidden states."""
        return [
            number for number, block in enumerate(self.flat()) if any(map(_wants_output, block._forward_hooks.values()))
        ]

    def reads_prev(self) -> bool:
        """Return whether every block reads the one before it, as in the original model."""
        fixed = self.masks.fixed
        return fixed is not None and fixed.sources == self._prev

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TappedStack:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if recurse:
            self.masks._apply(fn)  # not among `children()`, which returns the taps
        return self


def _wants_output(hook: Callable[..., Any]) -> bool:
    """Return whether a forward hook may need the output; hooks of FSDP need only the weights."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
