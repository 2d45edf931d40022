"""A stand-in for the output of a skipped block: the same form, with nothing computed.

The model still passes the output of the block to the next one, so it needs something of the right form. A form is plain
data, which fits into JSON:

    {"kind": "input"}                              the input of the block
    {"kind": "zeros", "scale": [[1, 1], [2, 1]]}   zeros; axis i has n_i * up / down entries, rounded up
    {"kind": "unrelated"}                          a tensor whose shape does not depend on the input: one zero
    {"kind": "argument", "name": "cache"}          an argument of the block (a number is its position)
    {"kind": "value", "value": None}               a constant
    {"kind": "tuple", "items": [...]}              also "list", and "dict" with "keys"

With "changed": true, the model computes something from it before it passes it to the next block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from maskconnect.errors import shown

Form = dict[str, Any]
Forms = dict[int, Form | None]
"""The forms of blocks that nothing reads, by number; None if the model uses the output."""
Arguments = Mapping[str | int, Any]
"""The arguments of a block, by position or name."""

CONSTANTS = (type(None), bool, int, float, str)


def form_of(y: Any, x: Tensor, arguments: Arguments) -> Form | None:
    """Return the form of y, the output of a block for x and other arguments; None if it cannot be described."""
    for name, value in arguments.items():
        if y is value and y is not x and not isinstance(y, CONSTANTS):
            return {"kind": "argument", "name": name}
    if isinstance(y, Tensor):
        return _form_of_tensor(y, x)
    if isinstance(y, CONSTANTS):
        return {"kind": "value", "value": y}
    if type(y) in (tuple, list, dict):
        values = y.values() if isinstance(y, dict) else y
        items = [form_of(value, x, arguments) for value in values]
        if any(item is None for item in items):
            return None
        keys = {"keys": list(y)} if isinstance(y, dict) and all(isinstance(key, str) for key in y) else {}
        if isinstance(y, dict) and not keys:
            return None
        return {"kind": type(y).__name__, **keys, "items": items}
    return None


def _form_of_tensor(y: Tensor, x: Tensor) -> Form:
    if x.is_nested or y.is_nested or (y.shape == x.shape and y.dtype == x.dtype):
        return {"kind": "input"}
    if y.dim() != x.dim() or 0 in x.shape:
        return {"kind": "unrelated"}
    return {"kind": "zeros", "scale": [_ratio(n, m) for n, m in zip(y.shape, x.shape, strict=True)]}


def _ratio(n: int, m: int) -> list[int]:
    """Return `up` and `down` that scale m to n: 1 and a stride if there is one."""
    stride = max(1, round(m / n)) if n else 1
    return [1, stride] if -(-m // stride) == n else list(Fraction(n, m).as_integer_ratio())


def stand_in(form: Form, x: Tensor, arguments: Arguments) -> Any:
    """Return an output of this form, for a block that gets x and other arguments."""
    kind = form["kind"]
    if kind == "input":
        return x
    if kind == "zeros":
        shape = [-(-n * up // down) for n, (up, down) in zip(x.shape, form["scale"], strict=True)]
        return x.new_zeros(()).expand(shape)
    if kind == "unrelated":
        return x.new_zeros(())
    if kind == "argument":
        return arguments[form["name"]]
    if kind == "value":
        return form["value"]
    items = [stand_in(item, x, arguments) for item in form["items"]]
    if kind == "dict":
        return dict(zip(form["keys"], items, strict=True))
    return tuple(items) if kind == "tuple" else items


def nan_like(x: Tensor) -> Tensor:
    """Return NaN in the shape of x.

    It keeps x alive, as x itself would: if a later block reads x, activation checkpointing of that block needs x again.
    """
    nan = x.new_full((), math.nan)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        vars(nan)["stands_for"] = x
    return nan.expand_as(x)


def read_form(found: Any) -> Form:
    """Read a form from plain data; raise a ValueError if it is invalid."""
    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "input": ("", bool),
        "unrelated": ("", bool),
        "zeros": ("scale", _is_scale),
        "argument": ("name", lambda name: type(name) in (int, str)),
        "value": ("value", lambda value: isinstance(value, CONSTANTS)),
        "tuple": ("items", _is_list),
        "list": ("items", _is_list),
        "dict": ("items", _is_list),
    }
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in checks:
        raise ValueError(f"{shown(found)} is not the form of an output")
    key, is_valid = checks[kind]
    if key and not (key in found and is_valid(found[key])):
        raise ValueError(f"{shown(found)} is not the form of an output")
    changed: Form = {"changed": True} if found.get("changed") is True else {}
    if key != "items":
        return {name: found[name] for name in ("kind", key) if name} | changed
    keys = found.get("keys", [])
    if kind == "dict" and not (isinstance(keys, list) and len(keys) == len(found["items"])):
        raise ValueError(f"{shown(found)} is not the form of an output")
    named = {"keys": keys} if kind == "dict" else {}
    return {"kind": kind, **named, "items": [*map(read_form, found["items"])], **changed}


def _is_list(found: Any) -> bool:
    return isinstance(found, list) and len(found) < 2**10


def _is_scale(found: Any) -> bool:
    def is_ratio(pair: Any) -> bool:
        return isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n < 2**31 for n in pair)

    return _is_list(found) and all(is_ratio(pair) and pair[1] for pair in found)


def changes(form: Form) -> bool:
    """Return whether the next block gets something else than this one."""
    if form.get("changed"):
        return True
    if form["kind"] in ("tuple", "list", "dict"):
        items: Sequence[Form] = form["items"]
        return not items or changes(items[0])
    return bool(form["kind"] != "input")


def is_known(form: Form) -> bool:
    """Return whether the shape of the first tensor of an output depends on the input in a known way."""
    if form["kind"] in ("tuple", "list", "dict"):
        return bool(form["items"]) and is_known(form["items"][0])
    return bool(form["kind"] in ("input", "zeros"))
