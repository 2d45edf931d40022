"""Run the blocks of a chain for a model that calls them one by one, like a plain list of blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch._dynamo.eval_frame import skip_code

from maskconnect.core.binary import BinaryMasks
from maskconnect.core.credit import Sampler
from maskconnect.core.inputs import Inputs
from maskconnect.core.outputs import Outputs
from maskconnect.core.replay import backward_pass
from maskconnect.core.running import RunningSum
from maskconnect.core.wiring import Layout, reaching_output
from maskconnect.errors import ConnectivityError
from maskconnect.retrofit.given import Given
from maskconnect.retrofit.origin import comes_from
from maskconnect.retrofit.stand_in import Forms, form_of, is_known, nan_like, stand_in
from maskconnect.retrofit.unread import Watch, can_be_watched, tensors_kept_by
from maskconnect.retrofit.walk import Passes, Past, Walk, WholeOutputs


class Walker:
    """Runs the blocks of a chain for a model that calls them one by one."""

    guards = True  # whether skipped blocks still exist, so that they can run if the model uses their outputs
    layout: Layout
    aggregation: str | Callable[[Sequence[Any], Tensor], Any]
    align: Callable[[Tensor, Size], Tensor | None] | None
    training: bool

    def start_walking(self) -> None:
        """Initialize the state of the passes."""
        self.passes, self.past = Passes(), Past()
        self.forms: Forms = {}  # of the latest pass
        self.forms_by_kind: dict[Any, Forms] = {}

    def begin(self) -> Inputs:
        """Begin a forward pass: draw masks, or take the current ones."""
        raise NotImplementedError

    def end(self, inputs: Inputs, output: Any, outputs: Outputs | None = None) -> Any:
        """End a forward pass."""
        return output

    def reaching_idle_parameters(self, x: Any, alive: Sequence[bool]) -> Any:
        """Return x with a link to the parameters of blocks that nothing reads, so that their gradient is zero."""
        return x

    def reads_prev(self) -> bool:
        """Return whether every block reads the one before it, as in the original model."""
        return False

    def run(self, number: int, block: nn.Module, given: Given) -> Any:
        """Run a block on the aggregate of its active sources; `given` are the arguments from the model.

        A compiler that traces the whole model traces this method, and cannot watch outputs. If it compiles only the
        block, as inside activation checkpointing, it does not trace what happens before and after the block.
        """
        if torch.compiler.is_compiling():
            before, absent, after = self._before, self._absent, self._after
        else:
            before, absent, after = self._before_untraced, self._absent_untraced, self._after_untraced
        walk, reading = before(number, block, given)
        if reading is None:
            assert walk is not None
            return absent(number, walk, given, watching=not torch.compiler.is_compiling())
        y = reading.call(block)
        if walk is None:
            return y
        return after(number, walk, block, given, y, watching=not torch.compiler.is_compiling())

    def _before(self, number: int, block: nn.Module, given: Given) -> tuple[Walk | None, Given | None]:
        """Return the pass (None if the block is repeated alone) and what the block reads (None if it is skipped)."""
        x = given.x if callable(self.aggregation) else given.main
        again = not torch.compiler.is_compiling() and backward_pass() is not None
        if number == 0 and again:
            self.passes.now, self.passes.first = None, x  # repeats this block or all blocks: the next call will show
            return None, given
        walk = self._begin(x) if number == 0 else self._follow(number, x, given.held, again=again)
        alive = walk.inputs.masks.alive
        if not walk.needed[number]:
            walk.block_read(x)
            return walk, None
        read = walk.read(number) if number else x
        if number == self.layout.targets[-1]:
            read = self.reaching_idle_parameters(read, alive)
            for watch in () if again or torch.compiler.is_compiling() else self.passes.watches.values():
                watch.end(given.held)
        walk.block_read(read)
        if not walk.inputs.learning and not alive[number] and number not in walk.forms:
            walk.kept = tensors_kept_by(block)
        if not walk.inputs.learning and not torch.is_grad_enabled():
            walk.forget(number)
        return walk, given.reading(read)

    def _after(self, number: int, walk: Walk, block: nn.Module, given: Given, y: Any, *, watching: bool) -> Any:
        """Return the output of the block for the model."""
        inputs, walk.last = walk.inputs, y
        if watching and not inputs.learning and not inputs.masks.alive[number] and number not in walk.forms:
            y = self._watched(number, walk, y, given, leaves=tensors_kept_by(block) != walk.kept)
        if number == self.layout.targets[-1]:
            y = self.end(inputs, y, walk.outputs)
            walk.release()
            self.passes.now = None
        return y

    _before_untraced = torch.compiler.disable(_before)  # type: ignore[no-untyped-call]
    _after_untraced = torch.compiler.disable(_after)  # type: ignore[no-untyped-call]

    def hooked(self) -> Collection[int]:
        """Return the blocks whose outputs are needed by hooks."""
        return ()

    def needed(self, masks: BinaryMasks, hooked: Collection[int] = (), forms: Forms | None = None) -> tuple[bool, ...]:
        """Return which blocks must run with fixed masks: those that the output, the model or a hook depends on."""
        forms = self.forms if forms is None else forms
        used = [k for k, on in enumerate(masks.alive) if not on and (forms.get(k) is None or k in hooked)]
        return reaching_output(masks.sources, (*self.layout.outputs, *used)) if used else masks.alive

    def judge(self, *, with_output: bool = False) -> None:
        """Decide which of the outputs that were watched in the last pass are unused; see `Watch.unused`."""
        for number, watch in self.passes.watches.items():
            if watch.over and watch.absent is None:  # otherwise the pass ended before its last block
                form = {**watch.form, "changed": True} if watch.changed else watch.form
                watch.forms[number] = form if watch.unused(with_output=with_output) else None
        self.passes.watches = {}

    def _absent(self, number: int, walk: Walk, given: Given, *, watching: bool) -> Any:
        """Return the stand-in for the output of a skipped block; using it raises an error."""
        form, x = walk.absent[number], given.main
        if self.guards and not self.training and not form.get("changed") and not x.is_nested:
            x = nan_like(x)  # so that a use that cannot be detected, as in TorchScript, shows
        y = stand_in(form, x, given.arguments)
        if not watching or not self.guards or not can_be_watched(y):
            return y
        self.passes.watches[-1 - number] = watch = Watch(form, walk.forms, partial(_refuse, walk.forms, number))
        return watch.wrap(y, form)

    _absent_untraced = torch.compiler.disable(_absent)  # type: ignore[no-untyped-call]

    def _watched(self, number: int, walk: Walk, y: Any, given: Given, *, leaves: bool) -> Any:
        """Return y, the output of a block that nothing reads, watched for uses by the model.

        `leaves` says that the block stored tensors in attributes, which the model may read.
        """
        form = form_of(y, given.main, given.arguments) if isinstance(given.main, Tensor) else None
        if backward_pass() is not None:
            return y
        if leaves or form is None or not is_known(form) or not can_be_watched(y):
            walk.forms[number] = None
            return y
        self.passes.watches[number] = watch = Watch(form, walk.forms)
        return watch.wrap(y, form)

    def _begin(self, x: Any) -> Walk:
        if self.passes.now is not None:
            self.passes.now.release()  # it did not reach its last block
        if not torch.compiler.is_compiling() and backward_pass() is None:  # a repeated pass skips the same blocks
            self.judge()
        inputs = self.begin()
        self.forms = forms = self.forms if inputs.learning or not self.guards else self._forms_for(x)
        known = dict(forms)  # another thread may change them during this pass
        if self.aggregation == "residual":
            inputs = replace(inputs, aggregation="sum")  # of outputs that depend on the fan-in
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
        needed = every if inputs.learning else self.needed(inputs.masks, self.hooked(), known)
        absent = {k: form for k, form in known.items() if form is not None}
        self.passes.now = walk = Walk(inputs, outputs, needed, forms, absent)
        self.passes.first, self.passes.looping = None, False
        return walk

    def _forms_for(self, x: Any) -> Forms:
        """Return the forms that passes with inputs like x share."""
        kind = self.training, x.shape[1:] if isinstance(x, Tensor) and x.dim() > 3 else None
        if torch.compiler.is_compiling():  # must not change state, which would trigger recompilation
            return self.forms_by_kind.get(kind, {})
        return self.forms_by_kind.setdefault(kind, {})

    def _new_pass_starts(self, x: Any) -> bool:
        """Return whether x, for a block that is not the first, belongs to a new pass (LayerDrop).

        This is so if the model has started another loop over the list, and x was not computed from the latest output.
        """
        walk, looping = self.passes.now, self.passes.looping
        self.passes.looping = False
        return looping and (walk is None or not comes_from(x, walk.last))

    def _no_pass_runs(self, number: int) -> bool:
        """Return whether no pass is running; a last block that is run alone is out of turn."""
        return self.passes.now is None and number < self.layout.targets[-1]

    def _follow(self, number: int, x: Any, held: Any, *, again: bool) -> Walk:
        """Return the running pass, if block `number` is next."""
        key = held if isinstance(held, Tensor) else x
        walk: Walk | None = self.past.walks.get(key) if again and isinstance(key, Tensor) else None
        if walk is not None:
            return walk.replay_at(number)
        if again and self.passes.now is None and self.passes.first is not None:
            first = self.passes.first
            self._begin(first).block_read(first)  # the whole pass is repeated
        elif self.training and not again and (self._new_pass_starts(x) or self._no_pass_runs(number)):
            self._begin(x).block_read(x)  # the model skipped the first block (LayerDrop)
        walk = self.passes.now
        come = None if walk is None else len(walk.outputs.found) + 1
        if walk is None or come is None or not (come == number or (self.training and come < number)):
            turn = "alone" if come is None else f"where block {come} is next"
            raise ConnectivityError(
                f"block {number} ran out of order, {turn}. Rewired blocks must run in order, from first to last. "
                "Activation checkpointing around single blocks needs use_reentrant=False."
            )
        for _ in range(number - come):
            walk.block_read(x)  # of a block that the model skipped
        walk.handed(x, 1 + number - come)
        if torch.is_grad_enabled() and isinstance(key, Tensor) and not torch.compiler.is_compiling():
            self.past.walks[key] = walk
        return walk


skip_code(Walker.run.__code__)  # traced with the whole model only: compiled for one block, it would lose the pass


def _refuse(forms: Forms, number: int) -> NoReturn:
    """Raise an error because the model uses the output of a skipped block; the block runs from now on."""
    forms[number] = None
    raise ConnectivityError(
        f"block {number} was left out, because the model did not use its output before, but now it does. Repeat this "
        "forward pass: the block runs from now on."
    )
