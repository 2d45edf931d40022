"""A trained network for programs that know nothing of maskconnect: as ONNX, or as a program of torch.export.

Either file takes batches of any number of images and carries the classes and the preprocessing with it. It is written
under another name, loaded again and compared with the network; only then does it get its own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, ConnectivityError, MaskConnectError, need
from maskconnect.pruning.prune import prune
from maskconnect.ship.checked import Run, Runner, checked_place, first_line, images_like, write_checked
from maskconnect.ship.preprocessing import FIELDS, Preprocessing, from_description

LARGEST = 2_000_000_000
"""How many bytes of weights fit into one ONNX file: its format ends at 2 GiB."""

Make = Callable[[nn.Module, Tensor], bytes]


def export_onnx(
    network: nn.Module,
    example: Tensor,
    path: Path | str,
    *,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    overwrite: bool = False,
) -> float:
    """Write a network as an ONNX file, and return how far its outputs are from the network's.

    The input is called "images" and the output "scores". A frozen network is pruned first.

    Args:
        network: the network, in whatever mode and wherever; it does not change.
        example: images as the network reads them, N x C x H x W; their values do not matter.
        path: the file.
        classes: the names of the classes, for the file's metadata.
        preprocessing: how to read pictures, likewise.
        overwrite: whether a file that is there may be replaced.
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        need(module, extra="export")
    said = metadata(classes, preprocessing)

    def make(ready: nn.Module, images: Tensor) -> bytes:
        return _onnx_bytes(ready, images, said)

    return _export(network, example, checked_place(path, overwrite=overwrite), make, _onnx_runner)


def export_pt2(
    network: nn.Module,
    example: Tensor,
    path: Path | str,
    *,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    overwrite: bool = False,
) -> float:
    """Write a network as a program that `torch.export.load` reads; arguments and result as of `export_onnx`.

    Classes and preprocessing are its extra files classes.json and preprocessing.json.
    """
    extra = {f"{key}.json": value for key, value in metadata(classes, preprocessing).items()}

    def make(ready: nn.Module, images: Tensor) -> bytes:
        content = io.BytesIO()
        torch.export.save(
            torch.export.export(ready, (images,), dynamic_shapes=_any_batch()), content, extra_files=extra
        )
        return content.getvalue()

    return _export(network, example, checked_place(path, overwrite=overwrite), make, _pt2_runner)


def ready_to_export(network: nn.Module, example: Tensor) -> nn.Module:
    """The network without masks: itself if it has none, else what pruning leaves, with batch norms folded."""
    masks = masks_of(network)
    if not masks:
        return network
    if not all(part.is_frozen for part in masks):
        raise ConnectivityError("this network is still learning its wiring; freeze it first: mc.freeze(model).")
    return prune(network, example, fold=True)


def metadata(classes: tuple[str, ...] | None, preprocessing: Preprocessing | None) -> dict[str, str]:
    """What a file says beside the network, each as JSON: the classes, and the preprocessing with its mean."""
    found = {} if classes is None else {"classes": json.dumps(list(classes))}
    if preprocessing is not None:
        mean = _plain(preprocessing.mean.cpu().numpy())
        found["preprocessing"] = json.dumps({**preprocessing.describe(), "mean": mean})
    return found


def preprocessing_of(text: str) -> Preprocessing:
    """The preprocessing that a file's metadata describe."""
    described = json.loads(text)
    mean = torch.tensor(described["mean"], dtype=torch.float32)
    return from_description({name: described[name] for name in FIELDS}, mean)


def _plain(values: Any) -> Any:
    """An array as nested lists, with as many digits as tell its numbers apart."""
    return [_plain(part) for part in values] if np.ndim(values) else float(str(values))


def _export(network: nn.Module, example: Tensor, place: Path, make: Make, runner: Runner) -> float:
    """Write what `make` makes of the network, if what `runner` runs is the same."""
    original = copy.deepcopy(network).cpu().eval()
    _check_example(original, example)
    ready = ready_to_export(original, example.cpu())
    try:
        with _quiet():
            content = make(ready, images_like(example, 2))
    except MaskConnectError:
        raise
    except Exception as error:  # of exporters, about whatever they cannot do
        raise MaskConnectError(f"this network cannot be exported: {first_line(error)}.") from error
    return write_checked(place, content, original, example, runner)


@torch.inference_mode()
def _check_example(network: nn.Module, example: Tensor) -> None:
    """The network must be able to read the example, and must give scores for it."""
    shape = "x".join(map(str, example.shape))
    try:
        scores = network(images_like(example, 1))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the network cannot read images of {shape}: {first_line(error)}.") from None
    if not isinstance(scores, Tensor):
        raise ConfigError(f"the network returns a {type(scores).__name__}; only one that returns a tensor is exported.")


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch", min=1)},)


def _onnx_bytes(ready: nn.Module, images: Tensor, said: dict[str, str]) -> bytes:
    """A network as the content of an ONNX file."""
    if sum(value.numel() * value.element_size() for value in ready.state_dict().values()) > LARGEST:
        raise ConfigError("this network is too large for an ONNX file, which ends at 2 GB; export it by --pt2.")
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["scores"]}
    program = torch.onnx.export(ready, (images,), dynamic_shapes=_any_batch(), **names, dynamo=True, verbose=False)
    assert program is not None
    model: Any = program.model_proto
    _forget_sources(model)
    for key, value in said.items():
        model.metadata_props.add(key=key, value=value)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _onnx_runner(path: Path) -> Run:
    runtime = need("onnxruntime", extra="export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        (scores,) = session.run(["scores"], {"images": x.numpy()})
        return torch.from_numpy(scores)

    return run


def _pt2_runner(path: Path) -> Run:
    with _quiet():
        return torch.export.load(path).module()


def _forget_sources(model: Any) -> None:
    """Take out which lines of Python the parts of an ONNX graph came from: names of files on this machine."""
    graph = model.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings, logs and prints of exporters, which are about their own insides."""
    before, silence = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
