"""Read a pickle that holds nothing but numpy arrays, lists, dicts, strings and numbers; refuse all else.

A pickle is a program. This reader lets it call only what builds a numpy array, so a file from anywhere can do no harm.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from maskconnect.errors import DataError

_reconstruct = np.empty(0).__reduce__()[0]


def _latin1(text: str, encoding: str) -> bytes:
    """What Python 3 calls for bytes in an old protocol."""
    if encoding != "latin1":
        raise DataError(f"it wants to encode text as {encoding!r}, which data has no need of")
    return text.encode("latin1")


ALLOWED = {
    ("_codecs", "encode"): _latin1,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise DataError(f"it wants to call {module}.{name}, which data has no need of")
        return ALLOWED[module, name]


def read_plain_pickle(content: bytes, what: str) -> Any:
    """What the pickle holds; `what` names the file in an error. Strings of Python 2 come as bytes."""
    try:
        found = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{what} is not read: {error}. Use the file from the official place.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{what} is damaged ({type(error).__name__}); get it again.") from None
    _check(found, what)
    return found


def _check(value: Any, what: str) -> None:
    """Arrays hold numbers, and containers hold only what we allow."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "buif":
            raise DataError(f"{what} is not read: it holds an array of {value.dtype}, which is not of numbers.")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, what)
            _check(item, what)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, what)
    elif not isinstance(value, str | bytes | int | float | None):
        raise DataError(f"{what} is not read: it holds a {type(value).__name__}.")
