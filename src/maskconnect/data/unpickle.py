"""Read a pickle that contains only numbers, strings, lists, dicts and arrays of numbers; refuse everything else.

A pickle is a program. Here it can only call stand-ins, which record and check the parts of an array. Numpy creates the
array afterwards, because its own unpickling trusts its input.
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
    """A stand-in for a numpy dtype."""

    __slots__ = ("order", "size", "word")

    def __init__(self, word: str) -> None:
        if word not in KINDS:
            raise DataError(f"it holds an array of type {shown(word)}, which is not a type of numbers")
        self.word, self.order, self.size = word, "|", int(word[1:])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, order, *rest = state
        order = order.decode() if isinstance(order, bytes) else order  # bytes from Python 2
        if version not in (3, 4) or order not in ("|", "<", ">", "=") or rest != [None, None, None, -1, -1, 0]:
            raise DataError("it holds an array with entries that are not plain numbers")
        self.order = order


class _Array:
    """A stand-in for a numpy array."""

    __slots__ = ("value",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_column, raw = state
        sound = isinstance(kind, _Kind) and isinstance(raw, bytes) and all(type(k) is int and k >= 0 for k in shape)
        if not sound or len(raw) != math.prod(shape) * kind.size:
            raise DataError("it holds an array whose values do not match its shape")
        flat = np.frombuffer(raw, dtype=np.dtype(kind.order + kind.word))
        self.value = flat.reshape(shape, order="F" if by_column else "C")


class _Call:
    """A function that the pickle may call but not change."""

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
            return arguments[0].encode("latin1")  # how Python 3 writes bytes in an old protocol
        raise DataError("it contains a function call that is not allowed")

    def __setstate__(self, state: Any) -> NoReturn:
        raise DataError("it changes a function that it may only call")


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
            raise DataError(f"it calls {module}.{name}, which is not allowed")
        return _Call(ALLOWED[module, name])


def read_plain_pickle(content: bytes, what: str) -> Any:
    """Return the content of a pickle; `what` names the file in errors. Strings of Python 2 become bytes."""
    try:
        _check_memo(content)
        return _plain(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except DataError as error:
        raise DataError(f"{what} is refused: {error}. Use the official file.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{what} is damaged ({type(error).__name__}); download it again.") from None


def _check_memo(content: bytes) -> None:
    """Refuse large memo indices: the unpickler would allocate that much memory, even for a small file."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("LONG_BINPUT", "PUT") and int(argument or 0) > len(content):
            raise DataError("it requests more memory than its content needs")


def _plain(found: Any) -> Any:
    """Replace stand-ins by arrays; an error if there is anything but plain values."""
    whole = [found]
    waiting: list[Any] = [whole]
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:  # it may contain itself
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
