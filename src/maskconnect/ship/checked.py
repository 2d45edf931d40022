"""Write what was exported only if it computes what the network does."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError
from maskconnect.training.files import TEMPORARY, fsync_folder, write_atomically

ALLOWED = 1e-4
"""How far the outputs of a file may be from the network's, relative to the largest."""

BATCHES = (1, 2, 7)
"""With how many images a file is tried out."""

Run = Callable[[Tensor], Tensor]
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


def write_checked(place: Path, content: bytes, network: nn.Module, example: Tensor, runner: Runner) -> float:
    """Write the file, if what is read back from it computes what the network does; returns how far they are apart."""
    temporary = place.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{place.suffix}")
    try:
        write_atomically(temporary, content)
        apart = _apart(network, runner, temporary, example)
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
def _apart(network: nn.Module, runner: Runner, path: Path, example: Tensor) -> float:
    """The largest difference of outputs over all batches, relative to the largest output of the network."""
    batches = [images_like(example, count) for count in BATCHES]
    expected = torch.cat([network(x) for x in batches])
    try:
        run = runner(path)
        found = torch.cat([run(x) for x in batches])
    except Exception as error:  # of runtimes, about whatever they cannot do
        raise MaskConnectError(f"what was exported cannot be run: {first_line(error)}.") from error
    if expected.shape != found.shape:
        return math.inf
    largest = float(expected.abs().max())
    return float((expected - found).abs().max()) / (largest or 1.0)


def images_like(example: Tensor, count: int) -> Tensor:
    """So many images like the example's: noise, the same every time."""
    shape, generator = (count, *example.shape[1:]), torch.Generator().manual_seed(count)
    return torch.randn(shape, generator=generator).to(example.dtype)


def first_line(error: Exception) -> str:
    """The first line of what an error says, without a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
