"""Controls beyond the paper: other explanations for the difference between learned and fixed wiring.

random      Fixed-Random of the same K: does the number of connections explain it?
retrained   the learned wiring, trained from scratch: the wiring, or learning masks together with the weights?
shuffled    the same with its connections exchanged so that every block reads, and is read by, as many as before: which
            blocks are connected, or how many connections each has?
draws       masks are drawn in phase 1 and never learn, and the wiring of `random` is frozen: learning, or training the
            weights under many wirings?
sum         Eq. 1 exactly as the paper writes it, without the mean or the averaged shortcuts (D1, D2)

Every recipe with a fixed wiring already has the same number of epochs and the same rates, so this needs no control.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from maskconnect.core.wiring import Layout, Sources
from maskconnect.errors import ConfigError, MaskConnectError, unknown_name
from maskconnect.experiments.grid import Cell
from maskconnect.experiments.paper import Row
from maskconnect.experiments.sweep import Outcome
from maskconnect.recipes import load
from maskconnect.recipes.naming import fan_in_of, wiring_name
from maskconnect.training.files import write_atomically
from maskconnect.training.folder import RunFolder

CONTROLS = ("random", "retrained", "shuffled", "draws", "sum")
WIRINGS = "wirings"
"""The folder for the wirings that controls train."""


def controls_of(text: str) -> tuple[str, ...]:
    """Parse names such as `random,shuffled`."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in found:
        if name not in CONTROLS:
            raise unknown_name("a control", name, CONTROLS)
    return tuple(dict.fromkeys(found))


def with_controls(rows: Sequence[Row], controls: Sequence[str]) -> list[Row]:
    """Return the rows of an experiment with controls after each learned row; existing random rows are not repeated."""
    recipes = [load(row.recipe, row.settings) for row in rows]
    fixed = [recipe for recipe in recipes if recipe.model.connectivity == "random"]
    there = {(recipe.data, replace(recipe.model, connectivity="learned")) for recipe in fixed}
    found: list[Row] = []
    for row, recipe in zip(rows, recipes, strict=True):
        found.append(row)
        if recipe.learns:
            kept = [name for name in controls if name != "random" or (recipe.data, recipe.model) not in there]
            found += [_control(row, name) for name in kept]
    return found


def _control(row: Row, name: str) -> Row:
    model = load(row.recipe, row.settings).model
    if name == "random":
        return Row(row.recipe, (*row.settings, "model.connectivity=random"), control=name)
    if name == "draws":
        label = f"Drawn, not learned, K={fan_in_of(model)}"
        return Row(row.recipe, (*row.settings, "learning.gradient=none"), control=name, label=label)
    if name == "sum":
        label = f"{wiring_name(model)}, literal sum"
        return Row(row.recipe, (*row.settings, "model.aggregation=sum"), control=name, label=label)
    words = {"retrained": "Learned wiring, from scratch", "shuffled": "Learned wiring, shuffled"}
    return Row(row.recipe, row.settings, control=name, label=f"{words[name]}, K={fan_in_of(model)}")


def wired_cells(
    rows: Iterable[Row], outcomes: Sequence[Outcome], out: Path, *, write: bool = True
) -> tuple[list[Cell], list[Outcome]]:
    """Return the runs of controls that train a learned wiring, and gaps for seeds whose wiring is missing.

    With `write`, the wirings are written to `out`, where the runs read them.
    """
    cells, gaps = [], []
    for row in rows:
        if row.needs_wiring:
            name = Row(row.recipe, row.settings).name
            for outcome in (o for o in outcomes if o.cell.values == (name,)):
                cell = row.cell(outcome.cell.recipe.seed)
                try:
                    if outcome.summary is None:
                        raise ConfigError(
                            f"{outcome.cell.name} has no result, and this run needs the wiring that it learns. Fix or "
                            "finish that run, then run the command again."
                        )
                    cells.append(_wired(row, cell, outcome, out, write=write))
                except MaskConnectError as error:
                    gaps.append(Outcome(cell, out / cell.name, None, str(error)))
    return cells, gaps


def _wired(row: Row, cell: Cell, outcome: Outcome, out: Path, *, write: bool) -> Cell:
    seed, layout = outcome.cell.recipe.seed, outcome.cell.recipe.model.layout()
    plain = outcome.result.wiring if outcome.result else RunFolder(outcome.folder).wiring()
    if row.control == "shuffled":
        plain = layout.to_plain(shuffled(layout, layout.from_plain(plain, what="wiring.json"), seed))
    place = out / WIRINGS / f"{cell.name}.json"
    if write:
        place.parent.mkdir(exist_ok=True)
        write_atomically(place, json.dumps(plain) + "\n")
    recipe = replace(cell.recipe, model=replace(cell.recipe.model, connectivity=plain))
    return replace(cell, recipe=recipe, extra=("--wiring", str(place)))


def shuffled(layout: Layout, sources: Sources, seed: int) -> Sources:
    """Return a random wiring in which every module reads, and is read by, as many others as in `sources`."""
    chance, allowed = random.Random(seed), layout.candidates()
    edges = [(source, target) for target, row in enumerate(sources) for source in row]
    there = set(edges)
    for _ in range(20 * len(edges)):
        i, j = chance.randrange(len(edges)), chance.randrange(len(edges))
        (a, b), (c, d) = edges[i], edges[j]
        if a != c and b != d and not {(a, d), (c, b)} & there and a in allowed[d] and c in allowed[b]:
            there -= {(a, b), (c, d)}
            there |= {(a, d), (c, b)}
            edges[i], edges[j] = (a, d), (c, b)
    rows: list[list[int]] = [[] for _ in sources]
    for source, target in edges:
        rows[target].append(source)
    return tuple(tuple(sorted(row)) for row in rows)
