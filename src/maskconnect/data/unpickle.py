"""Read a pickle that holds nothing but arrays of numbers, lists, dicts, strings and numbers; refuse all else.

A pickle is a program. What it may call here are stand-ins of our own, which note what an array is to be made of and
check it; numpy itself, whose own way back from a pickle trusts whatever it is told, makes the array only afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any, NoReturn

import numpy as np

from maskconnect.errors import DataError, shown

KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")


class _Kind:
    """Stands for a numpy dtype."""

    __slots__ = ("order", "size", "word")

    def __init__(self, word: str) -> None:
        if word not in KINDS:
            raise DataError(f"it holds an array of {shown(word)}, which is not of numbers")
        self.word, self.order, self.size = word, "|", int(word[1:])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, order, *rest = state
        order = order.decode() if isinstance(order, bytes) else order  # bytes from Python 2
        if version not in (3, 4) or order not in ("|", "<", ">", "=") or rest != [None, None, None, -1, -1, 0]:
            raise DataError("it holds an array that is more than numbers")
        self.order = order


class _Array:
    """Stands for a numpy array."""

    __slots__ = ("value",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_column, raw = state
        sound = isinstance(kind, _Kind) and isinstance(raw, bytes) and all(type(k) is int and k >= 0 for k in shape)
        if not sound or len(raw) != math.prod(shape) * kind.size:
            raise DataError("it holds an array whose values do not fill its shape")
        flat = np.frombuffer(raw, dtype=np.dtype(kind.order + kind.word))
        self.value = flat.reshape(shape, order="F" if by_column else "C")


class _Call:
    """Something that the pickle may call; it cannot be changed."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, *arguments: Any) -> Any:
        if self.what == "array":
            return _Array()
        if self.what == "kind":
            word = arguments[0]
            return _Kind(word.decode() if isinstance(word, bytes) else word)
        if self.what == "bytes" and len(arguments) == 2 and arguments[1] == "latin1":
            return arguments[0].encode("latin1")  # what Python 3 writes for bytes in an old protocol
        raise DataError("it makes a call that data has no need of")

    def __setstate__(self, state: Any) -> NoReturn:
        raise DataError("it changes what it may only call")


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "the type of arrays",
    ("numpy", "dtype"): "kind",
    ("_codecs", "encode"): "bytes",
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"it wants to call {module}.{name}, which data has no need of")
        return _Call(ALLOWED[module, name])


def read_plain_pickle(content: bytes, what: str) -> Any:
    """What the pickle holds; `what` names the file in an error. Strings of Python 2 come as bytes."""
    try:
        _check_memo(content)
        return _plain(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except DataError as error:
        raise DataError(f"{what} is not read: {error}. Use the file from the official place.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{what} is damaged ({type(error).__name__}); get it again.") from None


def _check_memo(content: bytes) -> None:
    """The unpickler makes as much room as the largest number of its memo says, however small the file is."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("LONG_BINPUT", "PUT") and int(argument or 0) > len(content):
            raise DataError("it asks for more memory than it can fill")


def _plain(found: Any) -> Any:
    """What was loaded, with arrays in the place of what stood for them, and nothing but plain values besides."""
    whole = [found]
    waiting: list[Any] = [whole]
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:  # it may hold itself
            continue
        seen.add(id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if isinstance(container, dict) and not isinstance(key, str | bytes | int | float):
                raise DataError(f"it holds a {type(key).__name__} as a key")
            if isinstance(value, _Array) and not isinstance(container, tuple):
                container[key] = value.value
            elif isinstance(value, dict | list | tuple):
                waiting.append(value)
            elif not isinstance(value, str | bytes | int | float | None):
                raise DataError(f"it holds a {type(value).__name__.strip('_')}")
    return whole[0]
