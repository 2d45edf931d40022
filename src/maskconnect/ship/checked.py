"""Write what was exported only if it computes what the network does."""

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
from maskconnect.pruning.verify import apart_of
from maskconnect.ship.as_program import only_tensors
from maskconnect.ship.given_inputs import GivenInputs
from maskconnect.training.files import TEMPORARY, fsync_folder, write_atomically

ALLOWED = 1e-4
"""How far the outputs of a file may be from the network's, relative to the largest."""

Run = Callable[..., Any]
Runner = Callable[[Path], Run]
"""Loads a file, and returns what computes its outputs."""


def checked_place(path: Path | str, *, overwrite: bool) -> Path:
    """Where to write; an error if that cannot be."""
    place = Path(path)
    if place.is_dir():
        raise ConfigError(f"{place} is a folder; name a file in it.")
    if not place.parent.is_dir():
        raise ConfigError(f"the folder {place.parent} does not exist; make it, or write to another.")
    if place.exists() and not overwrite:
        raise ConfigError(f"{place} exists; choose another name, or replace it by --overwrite.")
    return place


def write_checked(place: Path, content: bytes, network: nn.Module, given: GivenInputs, runner: Runner) -> float:
    """Write the file, if what is read back from it computes what the network does; returns how far they are apart."""
    temporary = place.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{place.suffix}")
    try:
        write_atomically(temporary, content)
        apart = _apart(network, runner, temporary, given)
        if not apart <= ALLOWED:
            raise MaskConnectError(
                f"the exported network differs from this one by {apart:.1e} of the largest output, more than "
                f"{ALLOWED:.0e}, so {place} was not written; perhaps the network is random, or depends on the values "
                "of its input in a way that exports cannot hold."
            )
        temporary.replace(place)
        fsync_folder(place.parent)
    except OSError as error:
        raise CheckpointError(f"{place} cannot be written: {error.strerror or error}.") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return apart


@torch.inference_mode()
def _apart(network: nn.Module, runner: Runner, path: Path, given: GivenInputs) -> float:
    """The largest difference of outputs on the example and on other sizes, relative to the largest output."""
    try:
        run = runner(path)
    except Exception as error:  # of runtimes, about whatever they cannot do
        raise MaskConnectError(f"what was exported cannot be run: {first_line(error)}.") from error
    largest = 0.0
    for number, case in enumerate((given, *given.others())):
        args, kwargs = case.arguments(case.values)
        try:
            expected = only_tensors(network(*args, **kwargs))
        except Exception:
            if number == 0:
                raise
            continue  # not every network takes any length
        try:
            found = case.call(run)
        except Exception as error:
            raise MaskConnectError(
                f"what was exported cannot be run on {case.shapes()}: {first_line(error)}."
            ) from error
        largest = max(largest, apart_of(tree_leaves(expected), tree_leaves(found)))
    return largest


def first_line(error: Exception) -> str:
    """The first line of what an error says, without a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
