"""Runs the blocks of a chain for a model that calls them one by one, as it does with a plain list of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch._dynamo.eval_frame import skip_code

from maskconnect.core.credit import Sampler
from maskconnect.core.inputs import Inputs
from maskconnect.core.masks import BinaryMasks
from maskconnect.core.outputs import Outputs
from maskconnect.core.replay import backward_pass
from maskconnect.core.running import RunningSum
from maskconnect.core.wiring import Layout, reaching_output
from maskconnect.errors import ConnectivityError
from maskconnect.retrofit.given import Given
from maskconnect.retrofit.origin import comes_from
from maskconnect.retrofit.stand_in import Form, form_of, is_known, stand_in
from maskconnect.retrofit.unread import Watch, can_be_watched, tensors_kept_by
from maskconnect.retrofit.walk import Passes, Past, Walk, WholeOutputs


class Walker:
    """Runs the blocks of a chain for a model that calls them one by one."""

    guards = True  # whether blocks that are left out are still there, and so run where the model uses their outputs
    layout: Layout
    aggregation: str | Callable[[Sequence[Any], Tensor], Any]
    align: Callable[[Tensor, Size], Tensor | None] | None
    training: bool

    def start_walking(self) -> None:
        """Make the state of the passes."""
        self.passes, self.past = Passes(), Past()
        self.forms: dict[int, Form | None] = {}  # of blocks that nothing reads; None: the model itself uses the output
        self.forms_by_kind: dict[Any, dict[int, Form | None]] = {}

    def begin(self) -> Inputs:
        """Begin a forward pass: draw masks, or take those that hold."""
        raise NotImplementedError

    def end(self, inputs: Inputs, output: Any, outputs: Outputs | None = None) -> Any:
        """End a forward pass."""
        return output

    def reaching_idle_parameters(self, x: Any, alive: Sequence[bool]) -> Any:
        """x, through which the parameters of blocks that nothing reads get a gradient of zero, if there are any."""
        return x

    def reads_prev(self) -> bool:
        """Whether every block reads the one before it, as the model had it."""
        return False

    def run(self, number: int, block: nn.Module, given: Given) -> Any:
        """Run a block on the aggregate of its active sources; `given` has what the model hands to it.

        A compiler that traces the model traces all of this. It cannot watch outputs. Where it compiles a block by
        itself, as inside activation checkpointing, it leaves what is before and after the block alone.
        """
        if torch.compiler.is_compiling():
            before, absent, after = self._before, self._absent, self._after
        else:
            before, absent, after = self._before_untraced, self._absent_untraced, self._after_untraced
        walk, reading = before(number, block, given)
        if reading is None:
            return absent(number, given, watching=not torch.compiler.is_compiling())
        y = reading.call(block)
        if walk is None:
            return y
        return after(number, walk, block, given, y, watching=not torch.compiler.is_compiling())

    def _before(self, number: int, block: nn.Module, given: Given) -> tuple[Walk | None, Given | None]:
        """The pass, and what the block reads: nothing where it is left out. No pass where nothing follows the block."""
        x = given.x if callable(self.aggregation) else given.main
        again = not torch.compiler.is_compiling() and backward_pass() is not None
        if number == 0 and again:
            self.passes.now, self.passes.first = None, x  # this block alone, or all: the next one will show
            return None, given
        walk = self._begin(x) if number == 0 else self._follow(number, x, given.held, again=again)
        alive = walk.inputs.masks.alive
        if not walk.needed[number]:
            walk.block_read(x)
            return walk, None
        read = walk.read(number) if number else x
        if number == self.layout.targets[-1]:
            read = self.reaching_idle_parameters(read, alive)
            for watch in () if torch.compiler.is_compiling() else self.passes.watches.values():
                watch.end(given.held)
        walk.block_read(read)
        if not walk.inputs.learning and not alive[number] and number not in self.forms:
            walk.kept = tensors_kept_by(block)
        if not walk.inputs.learning and not torch.is_grad_enabled():
            walk.forget(number)
        return walk, given.reading(read)

    def _after(self, number: int, walk: Walk, block: nn.Module, given: Given, y: Any, *, watching: bool) -> Any:
        """The output of the block as the model gets it."""
        inputs, walk.last = walk.inputs, y
        if watching and not inputs.learning and not inputs.masks.alive[number] and number not in self.forms:
            y = self._watched(number, y, given, leaves=tensors_kept_by(block) != walk.kept)
        if number == self.layout.targets[-1]:
            y = self.end(inputs, y, walk.outputs)
            walk.let_go()
            self.passes.now = None
        return y

    _before_untraced = torch.compiler.disable(_before)  # type: ignore[no-untyped-call]
    _after_untraced = torch.compiler.disable(_after)  # type: ignore[no-untyped-call]

    def hooked(self) -> Collection[int]:
        """The blocks whose outputs hooks ask for."""
        return ()

    def needed(self, masks: BinaryMasks, hooked: Collection[int] = ()) -> tuple[bool, ...]:
        """Which blocks fixed masks need: what the output reads, what the model or a hook uses, and what those read."""
        used = [k for k, on in enumerate(masks.alive) if not on and (self.forms.get(k) is None or k in hooked)]
        return reaching_output(masks.sources, (*self.layout.outputs, *used)) if used else masks.alive

    def judge(self, *, with_output: bool = False) -> None:
        """Decide which of the outputs that were watched in the last pass nobody used; see `Watch.unused`."""
        for number, watch in self.passes.watches.items():
            if watch.over and watch.absent is None:  # else the pass ended before its last block
                form = {**watch.form, "changed": True} if watch.changed else watch.form
                self.forms[number] = form if watch.unused(with_output=with_output) else None
        self.passes.watches = {}

    def _absent(self, number: int, given: Given, *, watching: bool) -> Any:
        """What the model gets from a block that is left out: of no use, and an error where it is used after all."""
        form = self.forms[number]
        assert form is not None
        x = given.main
        if self.guards and not self.training and not form.get("changed") and not x.is_nested:
            x = x.new_full((), math.nan).expand_as(x)  # a use that is not seen, as by TorchScript, must not be silent
        y = stand_in(form, x, given.arguments)
        if not watching or not self.guards or not can_be_watched(y):
            return y
        self.passes.watches[-1 - number] = watch = Watch(form, partial(_refuse, self.forms, number))
        return watch.wrap(y, form)

    _absent_untraced = torch.compiler.disable(_absent)  # type: ignore[no-untyped-call]

    def _watched(self, number: int, y: Any, given: Given, *, leaves: bool) -> Any:
        """y, the output of a block that nothing reads, such that it is seen whether the model uses it.

        `leaves` says that the block left tensors behind, which the model may look for.
        """
        form = form_of(y, given.main, given.arguments) if isinstance(given.main, Tensor) else None
        if backward_pass() is not None:
            return y
        if leaves or form is None or not is_known(form) or not can_be_watched(y):
            self.forms[number] = None
            return y
        self.passes.watches[number] = watch = Watch(form)
        return watch.wrap(y, form)

    def _begin(self, x: Any) -> Walk:
        if self.passes.now is not None:
            self.passes.now.let_go()  # it never came to its last block
        if not torch.compiler.is_compiling():
            self.judge()
        inputs = self.begin()
        if self.guards and not inputs.learning:
            kind = self.training, x.shape[1:] if isinstance(x, Tensor) and x.dim() > 3 else None
            if torch.compiler.is_compiling():  # leaves no trace: what changes in a pass would be compiled again
                self.forms = self.forms_by_kind.get(kind, {})
            else:
                self.forms = self.forms_by_kind.setdefault(kind, {})
        if self.aggregation == "residual":
            inputs = replace(inputs, aggregation="sum")  # of parts that fit the fan-in
            outputs: Outputs = WholeOutputs(
                self.layout,
                self.align,
                only_tensors=True,
                known=None,
                first=x,
                sampler=Sampler(inputs.images),
                running=RunningSum(),
            )
        else:
            outputs = inputs.outputs(x, self.align, None)
        every = (True,) * len(inputs.masks.alive)
        needed = every if inputs.learning else self.needed(inputs.masks, self.hooked())
        self.passes.now, self.passes.first, self.passes.looping = Walk(inputs, outputs, needed), None, False
        return self.passes.now

    def _another_begins(self, x: Any) -> bool:
        """Whether x, for a block that is not the first, is of another pass than the last one (LayerDrop).

        The model goes through the list again, and has not made x of what the last block returned.
        """
        walk, looping = self.passes.now, self.passes.looping
        self.passes.looping = False
        return looping and (walk is None or not comes_from(x, walk.last))

    def _is_first(self, number: int) -> bool:
        """Whether no pass is under way; a last block that is run alone is out of turn."""
        return self.passes.now is None and number < self.layout.targets[-1]

    def _follow(self, number: int, x: Any, held: Any, *, again: bool) -> Walk:
        """The pass that is under way, if block `number` is next."""
        key = held if isinstance(held, Tensor) else x
        walk: Walk | None = self.past.walks.get(key) if again and isinstance(key, Tensor) else None
        if walk is not None:
            return walk.again(number)
        if again and self.passes.now is None and self.passes.first is not None:
            self._begin(self.passes.first)  # the whole pass is run again
        elif self.training and not again and (self._another_begins(x) or self._is_first(number)):
            self._begin(x).block_read(x)  # the model left out the first block (LayerDrop)
        walk = self.passes.now
        come = None if walk is None else len(walk.outputs.found) + 1
        if walk is None or come is None or not (come == number or (self.training and come < number)):
            turn = "alone" if come is None else f"where block {come} is next"
            raise ConnectivityError(
                f"block {number} was run out of turn, {turn}: blocks that read several others run in order, from first "
                "to last. Activation checkpointing around single blocks needs use_reentrant=False."
            )
        for _ in range(number - come):
            walk.block_read(x)  # of a block that the model left out
        walk.handed(x, 1 + number - come)
        if self.training and torch.is_grad_enabled() and isinstance(key, Tensor) and not torch.compiler.is_compiling():
            self.past.walks[key] = walk
        return walk


skip_code(Walker.run.__code__)  # is traced with the model only: compiled for one block, it would lose the pass


def _refuse(forms: dict[int, Form | None], number: int) -> NoReturn:
    """The model uses the output of a block that was left out: an error, and the block runs from now on."""
    forms[number] = None
    raise ConnectivityError(
        f"block {number} was left out, because the model did not use its output before, and now it does. Run this "
        "again: the block runs from now on."
    )
