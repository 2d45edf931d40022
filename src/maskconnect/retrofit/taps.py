"""A stack whose modules are run one by one, by a model that was written for a plain list of them.

The model goes on doing what it did: it asks the list for its blocks and calls them, with what it will in between.
What it hands to block j counts as the output of block j-1; the block reads the aggregate of those that are active.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from maskconnect.core.inputs import Inputs
from maskconnect.core.outputs import Outputs
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError, ConnectivityError


@dataclass
class Walk:
    """A forward pass that has come as far as `outputs` say."""

    inputs: Inputs
    outputs: Outputs


class TappedStack(MaskedStack):
    """A stack that is also the list of its modules, each behind a tap.

    Blocks keep the names that they had in the list, so checkpoints fit: one without masks loads, and the masks stay.
    """

    runs_its_modules = False  # the model does

    def __init__(self, named: Mapping[str, nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(list(named.values()), *args, **kwargs)
        del self._modules["blocks"]
        for name, block in named.items():
            if hasattr(self, name):
                raise ConfigError(f"a block is called {name!r}, a name that the stack needs for itself; rename it.")
            self.add_module(name, block)
        self._names = tuple(named)
        self._taps = [Tap(self, number, block) for number, block in enumerate(named.values())]  # no children
        self._prev = self.layout.prev()
        self._walk: Walk | None = None

    def flat(self) -> list[nn.Module]:
        """All modules, in the order in which they run."""
        return [cast(nn.Module, self._modules[name]) for name in self._names]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = self.state_dict(prefix=prefix, keep_vars=True)
        ours = [name for name in own if name.startswith((f"{prefix}masks.", f"{prefix}scales"))]
        if not any(name in state_dict for name in ours):  # a checkpoint of the model before it was rewired
            state_dict.update({name: own[name] for name in ours})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __len__(self) -> int:
        return len(self._taps)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._taps)

    def __getitem__(self, number: int | slice) -> Any:
        return self._taps[number]

    def run(self, number: int, block: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one block, in the place of x, which the model hands to it, on the aggregate of its active sources."""
        fixed = self.masks.fixed
        if fixed is not None and fixed.sources == self._prev:
            return block(x, *args, **kwargs)
        last = number == len(self) - 1
        walk = self._begin(x) if number == 0 else self._follow(number)
        if number:
            walk.outputs.append(x)
            x = walk.inputs.one(number, walk.inputs.sources(number, walk.outputs))
        if last:
            x = self.reaching_idle_parameters(x, walk.inputs.masks.alive)
            self._walk = None
        y = block(x, *args, **kwargs)
        return self.end(walk.inputs, y, walk.outputs) if last else y

    def _begin(self, x: Any) -> Walk:
        inputs = self.begin()
        self._walk = Walk(inputs, inputs.outputs(x, self.align, None))
        return self._walk

    def _follow(self, number: int) -> Walk:
        """The pass that is under way, if block `number` is next."""
        walk = self._walk
        come = None if walk is None else len(walk.outputs.found) + 1
        if walk is None or come != number:
            turn = "alone" if come is None else f"where block {come} is next"
            raise ConnectivityError(
                f"block {number} was run out of turn, {turn}: blocks that read several others run in order, from first "
                "to last (and activation checkpointing goes around all of them or inside of each, but not around each)."
            )
        return walk

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_walk": None}  # type: ignore[no-untyped-call]


class Tap(nn.Module):
    """One block of a stack, as the model sees it: all but a call goes to the block itself."""

    def __init__(self, stack: TappedStack, number: int, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.__dict__["_place"] = stack, number  # no child: a stack holds its blocks, not the other way round

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the block in its stack."""
        stack, number = self._place
        return stack.run(number, self.block, x, *args, **kwargs)

    @property
    def training(self) -> bool:
        """Whether the block is in train mode."""
        return self.block.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in self.__dict__ and "block" in self._modules:
            self.block.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "block":
                raise
            return getattr(self.block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("block", "training"):
            super().__setattr__(name, value)
        else:
            setattr(self.block, name, value)
