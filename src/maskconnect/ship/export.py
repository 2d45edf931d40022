"""Export a trained network for programs without maskconnect: as ONNX, or as a program of torch.export.

Both files take inputs of any length along named axes, and include the classes and the preprocessing of images. Each is
written to a temporary name, loaded and compared with the network before it gets its final name.
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
"""The largest size of weights in an ONNX file in bytes: the format is limited to 2 GiB."""

Make = Callable[[ExportedProgram, GivenInputs, list[str]], bytes]
"""Returns the content of a file, from a program, its inputs, and the names of its outputs."""


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
    """Write a network as an ONNX file, and return the relative difference of its outputs from the network's.

        export_onnx(resnet, torch.zeros(1, 3, 32, 32), "model.onnx")
        axes = {0: "batch", 1: "length"}
        export_onnx(bert, tokenizer("A text.", return_tensors="pt"), "model.onnx",
                    dynamic={"input_ids": axes, "attention_mask": axes})

    A frozen network is pruned first. One batch of images, N x C x H x W, is called "images", and its output "scores".
    Other inputs have the keys of the dict, or the names of the network's arguments, in the order of the example.
    Outputs have the keys of the returned dict, else they are output_0, output_1 and so on. Caches of language models
    and values other than tensors are omitted. Models of transformers export with `attn_implementation` "sdpa", their
    default, and with "eager".

    The file is tested on the example, and on inputs of other sizes with the values of the example; a single
    floating-point input gets noise instead.

    Args:
        network: the network, in any mode and on any device; it is not changed.
        example: a tensor, a tuple of arguments, or a dict of arguments by name. Other values than
            tensors (`use_cache=False`) become constants of the file.
        path: the file.
        dynamic: names of the axes that may have any length, by input and position; axes with the same name have the
            same length. Without it, the first axis of every input is "batch".
        classes: the names of the classes, for the file's metadata.
        preprocessing: how images become inputs, for the metadata too.
        overwrite: whether to replace an existing file.
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
    """Write a network as a program that `torch.export.load` reads; arguments and result as for `export_onnx`.

    The program is called like the example: by position, or by name if it is a dict. It returns a tensor, or a tuple or
    dict of tensors. Classes and preprocessing are in its extra files classes.json and preprocessing.json.
    """
    extra = {f"{key}.json": value for key, value in metadata(classes, preprocessing).items()}

    def make(program: ExportedProgram, given: GivenInputs, outputs: list[str]) -> bytes:
        content = io.BytesIO()
        torch.export.save(program, content, extra_files=extra)
        return content.getvalue()

    place = checked_place(path, overwrite=overwrite)
    return _export(network, given_inputs(network, example, dynamic), place, make, _pt2_runner)


def ready_to_export(network: nn.Module, given: GivenInputs) -> nn.Module:
    """Return the network without masks: itself if it has none, else the pruned network with batch norms folded."""
    masks = masks_of(network)
    if not masks:
        return network
    if not all(part.is_frozen for part in masks):
        raise ConnectivityError(
            "the wiring of this network is still being learned; freeze it first with mc.freeze(model)."
        )
    return prune_and_compare(network, *given.arguments(given.values), fold=True, merge=True)[0]


def metadata(classes: tuple[str, ...] | None, preprocessing: Preprocessing | None) -> dict[str, str]:
    """Return the metadata of a file as JSON: the classes, and the preprocessing with its mean."""
    found = {} if classes is None else {"classes": json.dumps(list(classes))}
    if preprocessing is not None:
        mean = _plain(preprocessing.mean.cpu().numpy())
        found["preprocessing"] = json.dumps({**preprocessing.describe(), "mean": mean})
    return found


def preprocessing_of(text: str) -> Preprocessing:
    """Return the preprocessing that the metadata of a file describe."""
    described = json.loads(text)
    mean = torch.tensor(described["mean"], dtype=torch.float32)
    return from_description({name: described[name] for name in FIELDS}, mean)


def _plain(values: Any) -> Any:
    """Return an array as nested lists, with as many digits as the numbers need."""
    return [_plain(part) for part in values] if np.ndim(values) else float(str(values))


def _export(network: nn.Module, given: GivenInputs, place: Path, make: Make, runner: Runner) -> float:
    """Write the result of `make`, if `runner` computes the same as the network."""
    original = copy.deepcopy(network).cpu().eval()
    outputs = _outputs(original, given)
    ready = ready_to_export(original, given)
    try:
        with _quiet():
            content = make(program_of(ready, given), given, outputs)
    except MaskConnectError:
        raise
    except Exception as error:  # exporters raise many kinds of errors
        raise MaskConnectError(
            f"this network cannot be exported: {first_line(error)}. Check that the control flow of its forward does "
            "not depend on the values of tensors."
        ) from error
    return write_checked(place, content, original, given, runner)


@torch.no_grad()
def _outputs(network: nn.Module, given: GivenInputs) -> list[str]:
    """Return the names of the outputs; an error if the network fails on the example, or returns no tensors."""
    args, kwargs = given.arguments(given.values)
    try:
        y = network(*args, **kwargs)
    except MaskConnectError:
        raise
    except Exception as error:  # networks raise many kinds of errors
        raise ConfigError(
            f"the network cannot read {given.shapes()}: {first_line(error)}. Pass an example (--input on the command "
            "line) that it accepts."
        ) from None
    if given.images and not isinstance(y, Tensor):
        name = next(iter(inspect.signature(network.forward).parameters), "x")
        raise ConfigError(
            f"the network returns a {type(y).__name__}; for images, it must return a tensor of scores. To export all "
            f'tensors that it returns, pass the images by name: {{"{name}": images}}.'
        )
    found = ["scores"] if given.images else list(named_outputs(y))
    if not found:
        raise ConfigError(f"the network returns a {type(y).__name__} without tensors; there is nothing to export.")
    return found


def _onnx_bytes(program: ExportedProgram, given: GivenInputs, outputs: list[str], said: dict[str, str]) -> bytes:
    """Return the content of an ONNX file."""
    if sum(value.numel() * value.element_size() for value in program.state_dict.values()) > LARGEST:
        raise ConfigError("this network is too large for an ONNX file, which is limited to 2 GB; export it with --pt2.")
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
    """Remove the Python source lines of an ONNX graph, which contain file names of this machine."""
    graph = model.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings, logs and prints of exporters."""
    before, silence = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
