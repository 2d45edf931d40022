"""A run folder as a report needs it, read once and checked; nothing else of a report opens files of a run.

A run that has not ended is read as far as it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.checks import fan_in_of_targets, fixed_sources
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import CheckpointError
from maskconnect.models import build
from maskconnect.reading import parse_json, read_text
from maskconnect.recipes.naming import fan_in_of, kind_of_wiring, network_name, wiring_name
from maskconnect.recipes.schema import Network, Recipe
from maskconnect.report.wires import Wires, fixed_wires, learned_wires
from maskconnect.training.folder import RunFolder
from maskconnect.training.run_files import LARGEST


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A line of metrics about one epoch. What was not measured, or was not finite, is None."""

    epoch: int
    phase: str
    lr: float
    mask_lr: float
    loss: float | None
    accuracy: float | None
    test_loss: float | None
    test_top1: float | None
    validation_top1: float | None
    entropy: float | None
    changes: int | None
    scales: tuple[float | None, ...]


@dataclass(frozen=True)
class Frame:
    """The wiring at the end of an epoch."""

    epoch: int
    wires: Wires


@dataclass(frozen=True)
class Tested:
    """What the final network said of the test images."""

    label_N: Tensor
    class_N: Tensor  # the likeliest
    probability_N: Tensor
    wrong: tuple[int, ...]  # the surest mistakes, of which pictures were kept
    pictures_WCHW: Tensor | None


@dataclass(frozen=True)
class Run:
    """All that a report shows of one run."""

    path: Path
    recipe: Recipe
    summary: dict[str, Any] | None  # None: the run has not ended
    epochs: tuple[Epoch, ...]
    frames: tuple[Frame, ...]  # while masks were learned; the last is the wiring that is used
    classes: tuple[str, ...]
    tested: Tested | None
    starts: tuple[dict[str, Any], ...]  # the environment of every start
    written: str  # the recipe as its file says it

    @property
    def name(self) -> str:
        """What its folder is called."""
        return self.path.resolve().name

    @property
    def wires(self) -> Wires:
        """The wiring now, or at the end."""
        return self.frames[-1].wires

    @property
    def freeze(self) -> int | None:
        """After which epoch the masks were, or will be, frozen; None where there are none."""
        return sum(p.epochs for p in self.recipe.phase if p.mask_lr) if self.recipe.learns else None

    @property
    def done(self) -> int:
        """How many epochs are done."""
        return self.recipe.epochs if self.summary is not None else max((e.epoch for e in self.epochs), default=0)

    @property
    def fan_in(self) -> int | None:
        """K; None where blocks differ in it by more than how many candidates they have."""
        return fan_in_of(self.recipe.model)

    @property
    def kind(self) -> str:
        """What kind of wiring it has: `Learned`, `Fixed-Prev`."""
        return kind_of_wiring(self.recipe.model)

    @property
    def wiring(self) -> str:
        """Its kind, and K: `Learned, K=3`."""
        return wiring_name(self.recipe.model)

    @property
    def network(self) -> str:
        """What network it is: `ResNet-38`, `ResNeXt {29,8,8}`."""
        return network_name(self.recipe.model)

    @cached_property
    def block_parameters(self) -> tuple[int, ...]:
        """How many weights each block has."""
        return _block_parameters(replace(self.recipe.model, connectivity="full", fan_in=None))


def read_run(path: Path) -> Run:
    """Everything of a run; an error says which file is not as it should be."""
    folder = RunFolder(path)
    recipe = folder.recipe()
    layout = recipe.model.layout()
    try:
        summary = folder.summary() if folder.finished else None
        epochs = tuple(_epochs(path / "metrics.jsonl", whole=summary is not None))
        classes = folder.classes() if summary is not None else ()
        return Run(
            path=path,
            recipe=recipe,
            summary=summary,
            epochs=epochs,
            frames=tuple(_frames(folder, recipe, layout, None if summary is not None else _last(epochs))),
            classes=classes,
            tested=_tested(folder, len(classes)) if summary is not None else None,
            starts=tuple(folder.starts()),
            written=read_text(path / "recipe.toml"),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        raise CheckpointError(
            f"the files in {path} do not fit each other or are damaged ({_brief(error)}); use another copy of the run."
        ) from None


def _last(epochs: Sequence[Epoch]) -> int:
    return max((e.epoch for e in epochs), default=0)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _epochs(place: Path, *, whole: bool) -> Iterator[Epoch]:
    """The epochs of a run so far; the last line of one that is being written may be cut."""
    lines = read_text(place).splitlines() if place.exists() else []
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text, finite=False)
        except ValueError:
            if number == len(lines) and not whole:
                return
            raise ValueError(f"line {number} of metrics.jsonl is no JSON") from None
        if line["kind"] == "epoch":
            yield _epoch(line)


def _epoch(line: dict[str, Any]) -> Epoch:
    test, validation = line.get("test") or {}, line.get("validation") or {}
    return Epoch(
        epoch=int(line["epoch"]),
        phase=str(line["phase"]),
        lr=float(line["lr"]),
        mask_lr=float(line["mask_lr"]),
        loss=_number(line["loss"]),
        accuracy=_number(line["accuracy"]),
        test_loss=_number(test.get("loss")),
        test_top1=_number(test.get("top1")),
        validation_top1=_number(validation.get("top1")),
        entropy=_number(line.get("mask_entropy")),
        changes=None if line.get("top_changes") is None else int(line["top_changes"]),
        scales=tuple(map(_number, line.get("activation_scales", []))),
    )


def _number(value: Any) -> float | None:
    """A number that can be plotted; None for all others."""
    return None if value is None or not abs(float(value)) < LARGEST else float(value)


def _frames(folder: RunFolder, recipe: Recipe, layout: Layout, last: int | None) -> Iterator[Frame]:
    """The wiring at the end of every epoch in which it was learned, and the one that was fixed.

    A run that was stopped and went on may hold masks of epochs that it will see again: none after `last` is read.
    """
    place = folder.path / "wiring.json"
    fixed = layout.from_plain(folder.wiring(), what=str(place)) if place.exists() else None
    candidates, model, kinds = layout.candidates(), recipe.model, recipe.model.shape.module_kinds
    counts = fan_in_of_targets(model.fan_in, layout, candidates)
    if not recipe.learns:
        sources = fixed or fixed_sources(model.connectivity, layout, candidates, counts, recipe.seed)
        assert sources is not None
        yield Frame(0, fixed_wires(layout, sources, kinds))
        return
    masks = ConnectivityMasks(layout, candidates, counts or [])

    def wires(sources: Sources) -> Wires:
        return learned_wires(layout, candidates, sources, masks.real.detach(), kinds)

    files = {
        int(file.stem.removeprefix("epoch-")): file for file in (folder.path / "masks").glob("epoch-*.safetensors")
    }
    epochs = sorted(epoch for epoch in files if last is None or epoch <= last)
    if not epochs and fixed is None:  # the run has hardly begun
        yield Frame(0, wires(masks.top().sources))
    for epoch in epochs:
        real_TS = folder.tensors(f"masks/{files[epoch].name}")["stack0.real"]
        masks.real.data.copy_(_checked(real_TS, masks.real, files[epoch]))
        yield Frame(epoch, wires(masks.top().sources))
    if fixed is not None:
        yield Frame(epochs[-1] if epochs else 0, wires(fixed))


def _checked(found: Tensor, like: Tensor, file: Path) -> Tensor:
    if found.shape != like.shape:
        raise ValueError(f"{file.name} has masks of {tuple(found.shape)} and the recipe of {tuple(like.shape)}")
    if not bool(((found >= 0) & (found <= 1 + 1e-6)).all()):
        raise ValueError(f"{file.name} has masks outside [0, 1]")
    return found


def _tested(folder: RunFolder, classes: int) -> Tested:
    found = folder.predictions(classes)
    wrong, pictures = tuple(found["wrong"].tolist()), found.get("wrong_images")
    return Tested(found["label"], found["class"][:, 0], found["probability"][:, 0], wrong, pictures)


@lru_cache(maxsize=32)
def _block_parameters(model: Network) -> tuple[int, ...]:
    with torch.device("meta"):
        network = build(model.spec(num_classes=2, in_channels=3, seed=0))
    stack = next(part for part in network.modules() if isinstance(part, MaskedStack))
    return tuple(_weights(block) for block in stack.flat())


def _weights(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters())
