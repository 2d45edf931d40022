"""Write an exported file only if it gives the outputs of the network."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError
from maskconnect.pruning.verify import relative_difference
from maskconnect.ship.as_program import only_tensors
from maskconnect.ship.given_inputs import GivenInputs
from maskconnect.training.files import TEMPORARY, fsync_folder, write_atomically

ALLOWED = 1e-4
"""The largest difference between the outputs of a file and the network, relative to the largest output."""

OTHER_FORMAT = "Try the other format (ONNX or torch.export)."

Run = Callable[..., Any]
Runner = Callable[[Path], Run]
"""Loads a file, and returns a function that computes its outputs."""


def checked_place(path: Path | str, *, overwrite: bool) -> Path:
    """Return the path to write to; an error if that is not possible."""
    place = Path(path)
    if place.is_dir():
        raise ConfigError(f"{place} is a folder; pass a file in it.")
    if not place.parent.is_dir():
        raise ConfigError(f"the folder {place.parent} does not exist; create it, or choose another.")
    if place.exists() and not overwrite:
        raise ConfigError(f"{place} exists; choose another name, or replace it with --overwrite.")
    return place


def write_checked(place: Path, content: bytes, network: nn.Module, given: GivenInputs, runner: Runner) -> float:
    """Write the file, if what it computes matches the network; return the relative difference."""
    temporary = place.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{place.suffix}")
    try:
        write_atomically(temporary, content)
        difference = _difference(network, runner, temporary, given)
        if not difference <= ALLOWED:
            raise MaskConnectError(
                f"the exported network differs from this one by {difference:.1e} of the largest output, more than "
                f"{ALLOWED:.0e}, so {place} was not written; perhaps the network is random, or its control flow "
                "depends on the values of its input."
            )
        temporary.replace(place)
        fsync_folder(place.parent)
    except OSError as error:
        raise CheckpointError(f"{place} cannot be written: {error.strerror or error}; choose another path.") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return difference


@torch.inference_mode()
def _difference(network: nn.Module, runner: Runner, path: Path, given: GivenInputs) -> float:
    """Return the largest difference of outputs on the example and on other sizes, relative to the largest output."""
    try:
        run = runner(path)
    except Exception as error:  # runtimes raise many kinds of errors
        raise MaskConnectError(
            f"the exported file cannot be run and was discarded: {first_line(error)}. {OTHER_FORMAT}"
        ) from error
    largest = 0.0
    for number, case in enumerate((given, *given.others())):
        args, kwargs = case.arguments(case.values)
        try:
            expected = only_tensors(network(*args, **kwargs))
        except Exception:
            if number == 0:
                raise
            continue  # some networks do not accept every length
        try:
            found = case.call(run)
        except Exception as error:
            raise MaskConnectError(
                f"the exported file cannot be run on {case.shapes()} and was discarded: {first_line(error)}. "
                f"{OTHER_FORMAT}"
            ) from error
        largest = max(largest, relative_difference(tree_leaves(expected), tree_leaves(found)))
    return largest


def first_line(error: Exception) -> str:
    """Return the first line of an error, without a period."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
