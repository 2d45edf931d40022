"""A trained network for programs that know nothing of maskconnect: as ONNX, or as a program of torch.export.

Either file takes inputs of any length along the axes that have names, and carries the classes and the preprocessing of
images with it. It is written under another name, loaded again and compared with the network; only then does it get its
own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, ConnectivityError, MaskConnectError, need
from maskconnect.pruning.prune import prune_and_compare
from maskconnect.ship.as_program import named_outputs, program_of
from maskconnect.ship.checked import Run, Runner, checked_place, first_line, write_checked
from maskconnect.ship.given_inputs import GivenInputs, given_inputs
from maskconnect.ship.preprocessing import FIELDS, Preprocessing, from_description

LARGEST = 2_000_000_000
"""How many bytes of weights fit into one ONNX file: its format ends at 2 GiB."""

Make = Callable[[ExportedProgram, GivenInputs, list[str]], bytes]
"""The content of a file, from a program, its inputs, and the names of its outputs."""


def export_onnx(
    network: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: Path | str,
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    overwrite: bool = False,
) -> float:
    """Write a network as an ONNX file, and return how far its outputs are from the network's.

        export_onnx(resnet, torch.zeros(1, 3, 32, 32), "model.onnx")
        axes = {0: "batch", 1: "length"}
        export_onnx(bert, tokenizer("A text.", return_tensors="pt"), "model.onnx",
                    dynamic={"input_ids": axes, "attention_mask": axes})

    A frozen network is pruned first. One batch of images, N x C x H x W, is called "images", and its output "scores".
    Other inputs have the keys of the dict, or the names of the network's arguments; their order is that of the example.
    Outputs have the keys of what the network returns, else they are output_0, output_1 and so on. Caches of language
    models and other values that are not tensors are left out. Models of transformers export with `attn_implementation`
    "sdpa", their default, and with "eager".

    The file is tried on the example, and on inputs of other sizes that are made of its values; where a tensor of
    floating point is the only input, of noise.

    Args:
        network: the network, in whatever mode and wherever; it does not change.
        example: a tensor, a tuple of arguments, or a dict of arguments by name. What is not a tensor in it
            (`use_cache=False`) is a constant of the file.
        path: the file.
        dynamic: names of the axes that may have any length, by input and place; axes of one name have one length.
            Without it, the first axis of every input is "batch".
        classes: the names of the classes, for the file's metadata.
        preprocessing: how to read pictures, likewise.
        overwrite: whether a file that is there may be replaced.
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        need(module, extra="export")
    said = metadata(classes, preprocessing)

    def make(program: ExportedProgram, given: GivenInputs, outputs: list[str]) -> bytes:
        return _onnx_bytes(program, given, outputs, said)

    place = checked_place(path, overwrite=overwrite)
    return _export(network, given_inputs(network, example, dynamic), place, make, _onnx_runner)


def export_pt2(
    network: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: Path | str,
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    overwrite: bool = False,
) -> float:
    """Write a network as a program that `torch.export.load` reads; arguments and result as of `export_onnx`.

    The program is called as the example is given: by place, or by name if it is a dict. It returns a tensor, a tuple of
    tensors, or a plain dict of them. Classes and preprocessing are its extra files classes.json and preprocessing.json.
    """
    extra = {f"{key}.json": value for key, value in metadata(classes, preprocessing).items()}

    def make(program: ExportedProgram, given: GivenInputs, outputs: list[str]) -> bytes:
        content = io.BytesIO()
        torch.export.save(program, content, extra_files=extra)
        return content.getvalue()

    place = checked_place(path, overwrite=overwrite)
    return _export(network, given_inputs(network, example, dynamic), place, make, _pt2_runner)


def ready_to_export(network: nn.Module, given: GivenInputs) -> nn.Module:
    """The network without masks: itself if it has none, else what pruning leaves, with batch norms folded."""
    masks = masks_of(network)
    if not masks:
        return network
    if not all(part.is_frozen for part in masks):
        raise ConnectivityError("this network is still learning its wiring; freeze it first: mc.freeze(model).")
    return prune_and_compare(network, *given.arguments(given.values), fold=True, merge=True)[0]


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


def _export(network: nn.Module, given: GivenInputs, place: Path, make: Make, runner: Runner) -> float:
    """Write what `make` makes of the network, if what `runner` runs is the same."""
    original = copy.deepcopy(network).cpu().eval()
    outputs = _outputs(original, given)
    ready = ready_to_export(original, given)
    try:
        with _quiet():
            content = make(program_of(ready, given), given, outputs)
    except MaskConnectError:
        raise
    except Exception as error:  # of exporters, about whatever they cannot do
        raise MaskConnectError(f"this network cannot be exported: {first_line(error)}.") from error
    return write_checked(place, content, original, given, runner)


@torch.no_grad()
def _outputs(network: nn.Module, given: GivenInputs) -> list[str]:
    """The names of the outputs; an error if the network cannot read the example, or returns no tensors."""
    args, kwargs = given.arguments(given.values)
    try:
        y = network(*args, **kwargs)
    except MaskConnectError:
        raise
    except Exception as error:  # of networks, about whatever they cannot read
        raise ConfigError(f"the network cannot read {given.shapes()}: {first_line(error)}.") from None
    if given.images and not isinstance(y, Tensor):
        name = next(iter(inspect.signature(network.forward).parameters), "x")
        raise ConfigError(
            f"the network returns a {type(y).__name__}, and one for images returns a tensor of scores; to export all "
            f'tensors that it returns, pass the images by name: {{"{name}": images}}.'
        )
    found = ["scores"] if given.images else list(named_outputs(y))
    if not found:
        raise ConfigError(f"the network returns a {type(y).__name__} without tensors; there is nothing to export.")
    return found


def _onnx_bytes(program: ExportedProgram, given: GivenInputs, outputs: list[str], said: dict[str, str]) -> bytes:
    """A program as the content of an ONNX file."""
    if sum(value.numel() * value.element_size() for value in program.state_dict.values()) > LARGEST:
        raise ConfigError("this network is too large for an ONNX file, which ends at 2 GB; export it by --pt2.")
    names: dict[str, Any] = {"input_names": list(given.tensors), "output_names": outputs}
    axes = {name: dict(given.axes.get(name, {})) for name in given.tensors}
    made = torch.onnx.export(program, **names, dynamic_shapes=axes, dynamo=True, verbose=False)
    assert made is not None
    model: Any = made.model_proto
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

    def run(*args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        named = kwargs or dict(zip((given.name for given in session.get_inputs()), args, strict=True))
        return [torch.from_numpy(y) for y in session.run(None, {name: x.numpy() for name, x in named.items()})]

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
