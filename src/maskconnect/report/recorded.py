"""A run that `mc.Recorder` wrote, as a report needs it; and all runs that a person names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConfigError
from maskconnect.report.epochs import read_epochs
from maskconnect.report.history import Band, Frame, Run, Stack
from maskconnect.report.recording import RECORDING
from maskconnect.report.runs import checked_masks, mask_files, one_error, read_run
from maskconnect.report.wires import fixed_wires, learned_wires
from maskconnect.training.folder import METRICS, RUN, SUMMARY, RunFolder, find_runs
from maskconnect.training.run_files import COUNT, NOTHING, NUMBER, PERCENT, SECONDS, SOME, TEXT, Kind, read_plain

YES_OR_NO = Kind("true or false", lambda found: isinstance(found, bool))
STACK_SHAPE = {
    **{"name": TEXT, "sizes": [SOME], "layered": YES_OR_NO, "all_out": YES_OR_NO, "learned": YES_OR_NO},
    **{"candidates": [[COUNT]], "fan_in": [COUNT], "kinds": [TEXT], "parameters": [COUNT]},
}
RECORDING_SHAPE = {"model": TEXT, "stacks": [STACK_SHAPE]}
SCORES = {"loss?": (NUMBER, NOTHING), "top1?": (PERCENT, NOTHING)}
BEST = {"epoch": COUNT, "chosen_on": TEXT, "test": {"top1": PERCENT}}
SUMMARY_SHAPE = {
    **{"epochs": COUNT, "steps": COUNT, "seconds": SECONDS, "freeze": (COUNT, NOTHING), "test": SCORES},
    **{"best": (BEST, NOTHING), "parameters": {"weights": COUNT, "mask_entries": COUNT, "pruned": COUNT}},
}


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Run):
    """A run of your own training loop. It has no recipe, no predictions, and no name for its data."""

    model: str  # its class
    frozen_after: int | None
    most_sources: int | None

    @property
    def network(self) -> str:
        """The class of the model."""
        return self.model

    @property
    def freeze(self) -> int | None:
        """The epoch after which the wiring was frozen; None where it was not, or was never learned."""
        return self.frozen_after

    @property
    def fan_in(self) -> int | None:
        """K; None where blocks differ in it by more than their number of candidates."""
        return self.most_sources

    @property
    def data(self) -> str:
        """Nothing: a recording does not say what it was trained on."""
        return ""

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return "loss"

    @property
    def planned(self) -> int:
        """The number of epochs so far: nobody knows how many will follow."""
        return self.done

    @property
    def learns(self) -> bool:
        """Whether the wiring of any stack is learned."""
        return any(stack.wires.learned for stack in self.stacks)

    @property
    def bands(self) -> tuple[Band, ...]:
        """Masks learn until they are frozen; then weights alone are fine-tuned."""
        if not self.learns:
            return (Band(name="train", start=0, end=max(1, self.done)),)
        end = self.done if self.freeze is None else self.freeze
        found = (Band(name="learn", start=0, end=end), Band(name="fine-tune", start=end, end=self.done))
        return tuple(band for band in found if band.end > band.start) or (Band(name="learn", start=0, end=1),)

    @property
    def kind(self) -> str:
        """The kind of wiring."""
        return "Learned" if self.learns else "Fixed wiring"

    @property
    def wiring(self) -> str:
        """Its kind, and K: `Learned, K=3`."""
        return self.kind if self.fan_in is None else f"{self.kind}, K={self.fan_in}"

    @property
    def about(self) -> str:
        """One line about the run."""
        return f"recorded by mc.Recorder in {self.path}"


def is_recorded(path: Path) -> bool:
    """Whether a folder is one of `mc.Recorder`."""
    return (path / RECORDING).exists()


def find_all(places: Sequence[Path]) -> list[Path]:
    """All run folders that are named: each is a run itself, or a folder of runs."""
    return find_runs(places, (*RUN, RECORDING))


def read_any(path: Path) -> Run:
    """Read a run of a recipe or of `mc.Recorder`; an error says which file is damaged."""
    if not is_recorded(path):
        return read_run(path)
    if (path / "recipe.toml").exists():
        raise ConfigError(f"{path} holds both recipe.toml and {RECORDING}; remove the one that does not belong to it.")
    with one_error(path):
        return _read(path)


def _read(path: Path) -> RecordedRun:
    folder = RunFolder(path)
    described = read_plain(path / RECORDING, RECORDING_SHAPE)
    summary = read_plain(path / SUMMARY, SUMMARY_SHAPE) if folder.finished else None
    epochs = tuple(read_epochs(path / METRICS, whole=summary is not None))
    last = epochs[-1] if epochs else None
    frozen = None if last is None else last.freeze
    return RecordedRun(
        path=path,
        summary=summary,
        epochs=epochs,
        stacks=tuple(_stacks(folder, described["stacks"], 0 if last is None else last.epoch)),
        starts=tuple(folder.starts()),
        model=described["model"],
        frozen_after=frozen if summary is None else summary["freeze"],
        most_sources=_fan_in(described["stacks"]),
    )


def _fan_in(stacks: Sequence[dict[str, Any]]) -> int | None:
    """K of all stacks; None where targets differ in it by more than their number of candidates."""
    fan_in, most = set(), 0
    for stack in stacks:
        counts = [len(row) for row in stack["candidates"]][-len(stack["fan_in"]) :] if stack["fan_in"] else []
        most = max([most, *stack["fan_in"]])
        fan_in |= {k for k, count in zip(stack["fan_in"], counts, strict=True) if k < count}
    return most or None if fan_in <= {most} else None


def _stacks(folder: RunFolder, stacks: Sequence[dict[str, Any]], last: int) -> Iterator[Stack]:
    """Each stack with its wiring over all of training, up to epoch `last`."""
    files = {epoch: folder.tensors(name) for epoch, name in mask_files(folder.path).items() if epoch <= last}
    for number, stack in enumerate(stacks):
        layout = Layout(tuple(stack["sizes"]), layered=stack["layered"], all_out=stack["all_out"])
        candidates: Sources = tuple(tuple(row) for row in stack["candidates"])
        blocks = (candidates, stack["kinds"] or candidates, stack["parameters"])
        fits = all(len(found) == len(layout.places) for found in blocks) and (layout.layered or {*layout.sizes} == {1})
        if not fits or any(not {*row} <= {*most} for row, most in zip(candidates, layout.candidates(), strict=True)):
            raise ValueError(f"the modules of stack {number} in {RECORDING} do not fit its layout")
        frames = []
        for epoch, found in files.items() if stack["learned"] else list(files.items())[:1]:
            shape = len(layout.targets), max(map(len, candidates))
            real_TS = checked_masks(found[f"stack{number}.real"], shape, f"epoch {epoch}")
            sources = _sources(layout, candidates, found[f"stack{number}.used"])
            kinds = tuple(stack["kinds"])
            learned = learned_wires(layout, candidates, sources, real_TS, kinds)
            frames.append(Frame(epoch, learned if stack["learned"] else fixed_wires(layout, sources, kinds)))
        if not frames:
            raise ValueError("the folder has no masks")
        name = stack["name"] if len(stacks) > 1 else ""
        yield Stack(frames=tuple(frames), name=name, parameters=tuple(stack["parameters"]))


def _sources(layout: Layout, candidates: Sources, used_TS: Tensor) -> Sources:
    """The candidates that are used."""
    rows = [
        tuple(source for source, used in zip(candidates[target], row, strict=False) if used)
        for target, row in zip(layout.targets, used_TS.tolist(), strict=True)
    ]
    return ((),) * layout.targets.start + tuple(rows)
