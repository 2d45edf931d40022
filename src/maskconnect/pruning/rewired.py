"""Remove the blocks that nothing reads from a model that was rewired with `mc.rewire`.

The code of the model still runs the list, and may index it, so a removed block leaves a `PassThrough` in its place. If
each remaining block reads the remaining block before it, the list becomes the original container. Otherwise it becomes
a `WiredList`, which joins sources like the frozen masks.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from maskconnect.core.inputs import Inputs
from maskconnect.core.lookup import replaced, stacks_of
from maskconnect.core.stack import MaskedStack
from maskconnect.pruning.graphs import NOTES
from maskconnect.pruning.verify import output_of_example
from maskconnect.retrofit.given import Given
from maskconnect.retrofit.stack import TappedStack, sections_of
from maskconnect.retrofit.stand_in import CONSTANTS, Form, changes, read_form, stand_in
from maskconnect.retrofit.taps import MODULE_ATTRIBUTES, TapList
from maskconnect.retrofit.walker import Walker


class PassThrough(nn.Module):
    """Replaces a removed block: returns its input, in the form of the output of the block.

    It keeps simple attributes of the block, such as `attention_type`, which the code of the model may read.
    """

    never_traced = True

    def __init__(self, form: Form, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if name not in MODULE_ATTRIBUTES and isinstance(value, CONSTANTS):
                setattr(self, name, value)
        self.form, self.training = form, block.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input in the form of the output of the block."""
        given = Given.to(self, args, kwargs)
        return stand_in(self.form, given.main, given.arguments)


class WiredList(TapList, Walker):
    """The first list of a chain with a fixed wiring; it has the blocks that stay and no masks."""

    guards = False

    def __init__(self, stack: TappedStack) -> None:
        super().__init__()
        self.start_walking()
        self.layout, self.aggregation, self.align = stack.layout, stack.aggregation, stack.align
        self.candidates, self.scales = stack.masks.candidates, stack.scales
        self.forms = dict(stack.forms)
        self.binary = replace(stack.masks.current_wiring(), alive=stack.needed(stack.masks.current_wiring()))

    def begin(self) -> Inputs:
        """Begin a forward pass."""
        return Inputs(
            layout=self.layout,
            candidates=self.candidates,
            masks=self.binary,
            real=next(self.parameters(), torch.empty(0)),
            rows=None,
            aggregation=self.aggregation,
            scales=self.scales,
        )


def rewired_stacks_of(model: nn.Module) -> dict[str, TappedStack]:
    """Return the stacks from `mc.rewire`, by name."""
    return {name: stack for name, stack in stacks_of(model) if isinstance(stack, TappedStack)}


def built_stacks_of(model: nn.Module) -> list[tuple[str, MaskedStack]]:
    """Return all other stacks, under each of their names, outer stacks first."""
    return [(name, stack) for name, stack in stacks_of(model) if stack.runs_its_modules]


def find_unused_(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Find out from an example which unread blocks the model itself does not use either."""
    stacks = rewired_stacks_of(model).values()
    if not stacks:
        return
    for stack in stacks:
        stack.forms_by_kind, stack.passes.watches = {}, {}
    output = output_of_example(model, args, kwargs)
    gc.collect()
    for stack in stacks:
        stack.judge(with_output=True)
    del output  # only now: tensors in it count as used


def forms_of(stack: TappedStack) -> dict[int, Form]:
    """Return the form of the output of each block that is removed."""
    stays = stack.needed(stack.masks.current_wiring())
    forms = {number: stack.forms.get(number) for number, on in enumerate(stays) if not on}
    return {number: form for number, form in forms.items() if form is not None}


def describe(stack: TappedStack) -> dict[str, Any]:
    """Describe how a rewired stack is pruned, as plain data."""
    return {"forms": {str(number): form for number, form in forms_of(stack).items()}}


def read_forms_(stack: TappedStack, described: Mapping[str, Any]) -> None:
    """Read a description from `describe`; raise a ValueError, KeyError or TypeError if it is invalid."""
    stack.forms = {int(number): read_form(form) for number, form in described["forms"].items()}


def without_unused(model: nn.Module, notes: Mapping[str, Any]) -> nn.Module:
    """Replace rewired lists of a model by plain ones; they use the modules of the model."""
    for stack in dict.fromkeys(rewired_stacks_of(model).values()):
        made: dict[nn.Module, nn.Module] = dict(zip(stack.sections, _lists(stack), strict=True))
        vars(made[stack])[NOTES] = notes
        model = replaced(model, made)
    return model


def _lists(stack: TappedStack) -> list[nn.Module]:
    """Return the lists that replace the lists of a chain."""
    forms = forms_of(stack)
    blocks = [PassThrough(forms[k], block) if k in forms else block for k, block in enumerate(stack.flat())]
    left = iter(blocks)
    containers = [section.container({name: next(left) for name in section._block_names}) for section in stack.sections]
    if _is_chain(stack, forms):
        return containers
    wired = WiredList(stack)
    return list(sections_of(wired, wired, containers))


def _is_chain(stack: TappedStack, forms: Mapping[int, Form]) -> bool:
    """Return whether each remaining block reads only the remaining block before it, as the model passes it."""
    if stack.aggregation not in ("mean", "sum", "residual") or any(map(changes, forms.values())):
        return False
    sources = stack.masks.current_wiring().sources
    kept = [number for number in range(len(sources)) if number not in forms]
    return all(sources[j] == (before,) for before, j in pairwise(kept))
