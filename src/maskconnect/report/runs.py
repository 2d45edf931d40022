"""A run of a recipe as a report needs it, read once and checked.

A run that has not ended is read up to its last complete epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from maskconnect.core.checks import fan_in_of_targets, fixed_sources
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import CheckpointError
from maskconnect.models import build
from maskconnect.reading import read_text
from maskconnect.recipes.naming import WIRINGS, data_name, fan_in_of, kind_of_wiring, network_name, wiring_name
from maskconnect.recipes.schema import Network, Recipe
from maskconnect.report.epochs import read_epochs
from maskconnect.report.history import Band, Epoch, Frame, Plain, Run, Stack, Tested
from maskconnect.report.wires import Wires, fixed_wires, learned_wires, usual_wires
from maskconnect.training.folder import METRICS, WIRING, RunFolder


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Run):
    """A run that `maskconnect train` made from a recipe."""

    recipe: Recipe
    written: str  # the recipe, as text

    @property
    def planned(self) -> int:
        """The number of epochs of all phases."""
        return self.recipe.epochs

    @property
    def done(self) -> int:
        """The number of epochs that are done."""
        return self.recipe.epochs if self.summary is not None else super().done

    @property
    def learns(self) -> bool:
        """Whether connectivity is learned, or fixed from the start."""
        return self.recipe.learns

    @property
    def freeze(self) -> int | None:
        """The epoch after which the wiring was, or will be, frozen; None where it is fixed from the start."""
        return sum(p.epochs for p in self.recipe.phase if p.mask_lr) if self.recipe.learns else None

    @property
    def bands(self) -> tuple[Band, ...]:
        """The phases of the recipe; `freeze` is shown as `frozen`, because the freeze is the moment when it starts."""
        found, start = [], 0
        for phase in self.recipe.phase:
            name = "frozen" if phase.name == "freeze" else phase.name
            found.append(Band(name=name, start=start, end=start + phase.epochs))
            start += phase.epochs
        return tuple(found)

    @property
    def fan_in(self) -> int | None:
        """K; None where blocks differ in it by more than their number of candidates."""
        return fan_in_of(self.recipe.model)

    @property
    def kind(self) -> str:
        """The kind of wiring: `Learned`, `Fixed-Prev`."""
        return kind_of_wiring(self.recipe.model)

    @property
    def wiring(self) -> str:
        """Its kind, and K: `Learned, K=3`."""
        return wiring_name(self.recipe.model)

    @property
    def network(self) -> str:
        """The name of the network: `ResNet-38`, `ResNeXt {29,8,8}`."""
        return network_name(self.recipe.model)

    @property
    def data(self) -> str:
        """The name of the data."""
        return data_name(self.recipe)

    @property
    def about(self) -> str:
        """One line about the run."""
        return f"{self.recipe.about or self.recipe.name}, seed {self.recipe.seed}"

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return "cross-entropy"

    @property
    def block_parameters(self) -> tuple[int, ...]:
        """The number of weights of each block."""
        return self.stacks[0].parameters


def read_run(path: Path) -> TrainedRun:
    """Read a run of a recipe; an error says which file is damaged."""
    folder = RunFolder(path)
    recipe = folder.recipe()
    with one_error(path):
        summary = folder.summary() if folder.finished else None
        epochs = tuple(_with_decay(recipe, read_epochs(path / METRICS, whole=summary is not None)))
        last = None if summary is not None else max((e.epoch for e in epochs), default=0)
        classes = folder.classes() if summary is not None else ()
        return TrainedRun(
            path=path,
            recipe=recipe,
            summary=summary,
            epochs=epochs,
            stacks=(_stack(folder, recipe, last),),
            classes=classes,
            tested=_tested(folder, len(classes)) if summary is not None else None,
            starts=tuple(folder.starts()),
            written=read_text(path / "recipe.toml"),
        )


@contextmanager
def one_error(path: Path) -> Iterator[None]:
    """Turn any error of reading damaged files into one sentence."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        brief = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(
            f"the files in {path} are damaged, or do not belong to one run ({brief}); use another copy of the run."
        ) from None


def _with_decay(recipe: Recipe, epochs: Iterable[Epoch]) -> Iterator[Epoch]:
    """Each epoch with the factor by which `learning.decay` makes its last mask update smaller."""
    for e in epochs:
        if recipe.learning.decay and e.mask_lr and e.mask_decay is None:
            how = recipe.learning.how(recipe.steps_of_learning(e.step // e.epoch))
            e = replace(e, mask_decay=how.rate_after(e.step - 1))  # the rate is taken before a step is counted
        yield e


def _stack(folder: RunFolder, recipe: Recipe, last: int | None) -> Stack:
    """The wiring of a run over all of training, beside that of the plain network where they differ (figure 4)."""
    spec = recipe.model.shape
    frames = tuple(_frames(folder, recipe, recipe.model.layout(), last))
    plain = Plain(WIRINGS[spec.PLAIN], spec.plain_words, usual_wires(spec))
    return Stack(
        frames=frames,
        parameters=_block_parameters(replace(recipe.model, connectivity="full", fan_in=None)),
        plain=plain if frames[-1].wires.sources != plain.wires.sources else None,
    )


def _frames(folder: RunFolder, recipe: Recipe, layout: Layout, last: int | None) -> Iterator[Frame]:
    """The wiring at the end of every epoch in which it was learned, and the frozen one.

    A run that was stopped may hold masks of epochs that it will repeat when it resumes: none after `last` is read.
    """
    place = folder.path / WIRING
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

    files = mask_files(folder.path)
    epochs = [epoch for epoch in files if last is None or epoch <= last]
    if not epochs and fixed is None:  # the run has only just started
        yield Frame(0, wires(masks.top().sources))
    for epoch in epochs:
        real_TS = folder.tensors(files[epoch])["stack0.real"]
        masks.real.data.copy_(checked_masks(real_TS, masks.real.shape, files[epoch]))
        yield Frame(epoch, wires(masks.top().sources))
    if fixed is not None:
        yield Frame(epochs[-1] if epochs else 0, wires(fixed))


def mask_files(path: Path) -> dict[int, str]:
    """The files of masks in a run folder, by epoch, in order; a copy such as `epoch-0001 (1)` is left out."""
    names = ((re.fullmatch(r"epoch-(\d+)", file.stem), file.name) for file in path.glob("masks/*.safetensors"))
    return dict(sorted((int(match[1]), f"masks/{name}") for match, name in names if match))


def checked_masks(found: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Real masks from a file, if they fit the network; a ValueError says what does not fit."""
    if tuple(found.shape) != tuple(shape):
        raise ValueError(f"{name} has masks of shape {tuple(found.shape)}, the network of {tuple(shape)}")
    if not bool(((found >= 0) & (found <= 1 + 1e-6)).all()):
        raise ValueError(f"{name} has masks outside [0, 1]")
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
    return tuple(sum(p.numel() for p in block.parameters()) for block in stack.flat())
