"""Run a grid of cells, several at a time; a sweep can be stopped and resumed at any moment.

A cell is a normal run folder, written by `maskconnect train`. Finished cells are not repeated; unfinished ones resume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskconnect.errors import ConfigError, MaskConnectError
from maskconnect.experiments.engine import LOGS, Engine
from maskconnect.experiments.grid import Cell, Grid
from maskconnect.experiments.kept import Kept, Result
from maskconnect.experiments.runner import Runner, keep_result, other_recipe
from maskconnect.reading import read_json
from maskconnect.training.files import LOCK, is_unfinished, lock, remove_unfinished, write_atomically
from maskconnect.training.folder import RunFolder
from maskconnect.training.progress import Silent
from maskconnect.training.stop import StopRequests

LIST = "sweep.json"
"""The file that says which sweep a folder belongs to."""


NOT_RUN = "it has not been run"


@dataclass(frozen=True)
class Outcome:
    """The result of a cell, or why it has none."""

    cell: Cell
    folder: Path
    summary: dict[str, Any] | None  # None: there is no result
    why: str = ""  # the reason, if there is no result
    result: Result | None = None  # the kept result, if there is one; the folder may be gone then


def sweep(grid: Grid, out: Path, *, engine: Engine, show: Silent, kept: Kept | None = None) -> list[Outcome]:
    """Run the unfinished cells of a grid; after SIGTERM or Ctrl-C, raise `Stopped` once all runs have saved."""
    recipe = str(Path(grid.recipe).resolve()) if ".toml" in grid.recipe else grid.recipe
    ours = {"recipe": recipe, "settings": list(grid.settings), "over": [field for field, _ in grid.over]}
    return run_cells(grid.cells(), out, ours, engine=engine, show=show, kept=kept)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    ours: dict[str, Any],
    *,
    engine: Engine,
    show: Silent,
    kept: Kept | None = None,
) -> list[Outcome]:
    """Run the unfinished cells in a folder that belongs to `ours`; cells with a kept result count as finished."""
    with ExitStack() as stack:
        claim(ours, out, stack)
        engine.check(out)
        todo = [cell for cell in cells if not (_is_kept(cell, kept) or _finished(cell, out, kept))]
        ended = len(cells) - len(todo)
        before = f"; {ended} already finished" if ended else ""
        show.line(f"{len(cells)} run{'s' * (len(cells) > 1)} in {out}, {engine.about}{before}")
        requests = stack.enter_context(StopRequests())
        stack.enter_context(show)
        failed = Runner(engine, out, todo, len(cells), show, requests, kept).run()
    return [_outcome(cell, out, failed, kept) for cell in cells]


def found_cells(cells: Sequence[Cell], out: Path, kept: Kept | None = None) -> list[Outcome]:
    """Return what is known about cells, from kept results and finished runs; run nothing."""
    there = {cell.name for cell in cells if _is_kept(cell, kept) or RunFolder(out / cell.name).finished}
    missing = {cell.name: NOT_RUN for cell in cells if cell.name not in there}
    return [_outcome(cell, out, missing, kept) for cell in cells]


def claim(ours: dict[str, Any], out: Path, stack: ExitStack) -> None:
    """Claim the folder for this sweep; fail if it belongs to another, or if another process works in it."""
    if out.exists() and not _is_ours(out):
        raise ConfigError(f"{out} exists and does not hold a sweep; choose another folder with --out.")
    try:
        (out / LOGS).mkdir(parents=True, exist_ok=True)
        held = stack.enter_context((out / LOCK).open("w"))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another folder with --out.") from None
    if not lock(held):
        raise ConfigError(f"another sweep is running in {out}; wait for it, or choose another --out.")
    if (out / LIST).exists():
        theirs = _list(out)
        key = next((key for key, value in ours.items() if theirs.get(key) != value), None)
        if key is not None:
            raise ConfigError(
                f"{out} holds another sweep: it was started {_typed(key, theirs.get(key))}, now "
                f"{_typed(key, ours[key])}. More seeds or values can be added; for anything else choose another --out."
            )
    remove_unfinished(out)
    write_atomically(out / LIST, json.dumps(ours, indent=1) + "\n")


def _typed(key: str, value: Any) -> str:
    """Return a part of the description of a sweep, as it was typed: `with --set model.depth=20`."""
    flag = {"settings": "--set", "over": "--over"}.get(key)
    if flag is None or not isinstance(value, list):
        return f"with {key} {value}"
    return f"with {' '.join(f'{flag} {each}' for each in value)}" if value else f"without {flag}"


def _is_ours(out: Path) -> bool:
    """Return whether a folder is empty, or holds a sweep, or what a full disk or a kill left of a new one."""
    if not out.is_dir():
        return False
    return (out / LIST).exists() or {child.name for child in out.iterdir() if not is_unfinished(child)} <= {LOGS, LOCK}


def _list(out: Path) -> dict[str, Any]:
    try:
        found = read_json(out / LIST)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{out / LIST} is damaged; remove it, and run the sweep again: it resumes from the runs in the folder."
        )
    return found


def _is_kept(cell: Cell, kept: Kept | None) -> bool:
    """Return whether a cell has a kept result; its run folder may be gone."""
    return kept is not None and kept.get(cell.recipe) is not None


def _finished(cell: Cell, out: Path, kept: Kept | None) -> bool:
    """Return whether a cell has finished, and keep its result; fail if its folder holds a run of another recipe."""
    folder = RunFolder(out / cell.name)
    if (folder.path / "metrics.jsonl").exists() and (other := other_recipe(folder, cell)):
        raise ConfigError(other)
    if folder.finished:
        keep_result(folder, kept)
    return folder.finished


def _outcome(cell: Cell, out: Path, failed: dict[str, str], kept: Kept | None) -> Outcome:
    folder, known = RunFolder(out / cell.name), None if kept is None else kept.get(cell.recipe)
    if cell.name in failed:
        return Outcome(cell, folder.path, None, failed[cell.name])
    try:
        summary = folder.summary() if known is None else known.summary
    except MaskConnectError:
        return Outcome(cell, folder.path, None, f"{folder.path / 'summary.json'} is damaged")
    return Outcome(cell, folder.path, summary, result=known)
