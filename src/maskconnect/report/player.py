"""What the page needs to play the wiring of a run over the whole of training: plain data for its script."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from maskconnect.report.charts import bands_of
from maskconnect.report.drawing import crowding, daylight
from maskconnect.report.runs import Frame, Run
from maskconnect.report.wires import Wires, usual_wires

ROOM = 900_000
"""How many characters the frames of all runs of a page may take together."""


def player_of(run: Run, room: int) -> dict[str, Any]:
    """The geometry of a network, and its wiring after every epoch, or after some where all would take too much room."""
    layout, scene, spec = run.wires.layout, run.wires.scene, run.recipe.model.shape
    frames = _some([frame for frame in run.frames if frame.wires.edges], room)
    return {
        "layered": layout.layered,
        "sizes": layout.sizes,
        "xs": scene.xs,
        "ys": scene.ys,
        "side": scene.side,
        "wide": scene.wide,
        "kinds": run.wires.kinds,
        "every": scene.every,
        "bulges": scene.bulges,
        "bends": scene.bends,
        "width": scene.width,
        "height": scene.height,
        "middle": scene.middle,
        "ends": scene.ends(),
        "wiring": _looks(run.wires),
        "usual": _looks(usual_wires(spec)),
        "plain": spec.PLAIN,
        "fan_in": [len(row) for row in run.wires.sources],
        "parameters": run.block_parameters,
        "learned": run.wires.learned,
        "epochs": run.recipe.epochs,
        "done": run.done,
        "freeze": run.freeze,
        "phases": [[band.name, band.start, band.end] for band in bands_of(run)],
        "frames": [[frame.epoch, _packed(frame.wires)] for frame in frames],
    }


def _looks(wires: Wires) -> list[float]:
    """By how much lines are thinner and fainter than alone, because there are many."""
    return [round(crowding(wires), 3), round(daylight(wires), 3)]


def _packed(wires: Wires) -> str:
    """The connections in order: two bytes for the source and two for its value, little end first."""
    numbers = [part for edge in wires.edges for part in (edge.source, round(edge.value * 65535))]
    return base64.b64encode(struct.pack(f"<{len(numbers)}H", *numbers)).decode()


def _some(frames: Sequence[Frame], room: int) -> list[Frame]:
    """All frames if they fit, else some of them, evenly; the first and the last always."""
    latest = list({frame.epoch: frame for frame in frames}.values())  # the frozen wiring in the place of the top-K
    if not latest:
        return []
    each = 6 * len(latest[0].wires.edges)  # 4 bytes an edge, and base64
    count = min(len(latest), max(2, room // max(1, each)))
    if count < 2:
        return latest[-1:]
    return [latest[round(i * (len(latest) - 1) / (count - 1))] for i in range(count)]
