"""The data with which the script of the page plays the wiring of a stack over all of training."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from maskconnect.report.drawing import fading, thinning
from maskconnect.report.history import Frame, Run
from maskconnect.report.wires import Wires

ROOM = 900_000
"""The number of characters that the frames of all runs of a page may take together."""


def player_of(run: Run, room: int, number: int = 0) -> dict[str, Any]:
    """The geometry of a stack and its wiring after every epoch, or after some if all would need too much room."""
    stack = run.stacks[number]
    wires, plain = stack.wires, stack.plain
    layout, scene = wires.layout, wires.scene
    frames = _some([frame for frame in stack.frames if frame.wires.edges], room)
    rejected = _rejected(frames, room)
    return {
        "layered": layout.layered,
        "all_out": layout.all_out,
        "sizes": layout.sizes,
        "xs": scene.xs,
        "ys": scene.ys,
        "side": scene.side,
        "wide": scene.wide,
        "kinds": wires.kinds,
        "every": scene.every,
        "bulges": scene.bulges,
        "bends": scene.bends,
        "width": scene.width,
        "height": scene.height,
        "middle": scene.middle,
        "ends": scene.ends(),
        "wiring": _looks(wires),
        "plain": None if plain is None else {"look": _looks(plain.wires), "sources": plain.wires.sources},
        "fan_in": [len(row) for row in wires.sources],
        "candidates": None if wires.candidates in ((), layout.candidates()) else wires.candidates,
        "parameters": stack.parameters,
        "learned": wires.learned,
        "epochs": run.planned,
        "done": run.done,
        "freeze": run.freeze,
        "phases": [[band.name, band.start, band.end] for band in run.bands],
        "frames": [[f.epoch, _packed(f.wires), more] for f, more in zip(frames, rejected, strict=True)],
    }


def _looks(wires: Wires) -> list[float]:
    """The factors by which lines are thinner and fainter because there are many of them."""
    return [round(thinning(wires), 3), round(fading(wires), 3)]


def _packed(wires: Wires) -> str:
    """The connections in order, little-endian: two bytes for the source and two for its mask value."""
    return _base64([part for edge in wires.edges for part in (edge.source, round(edge.value * 65535))])


def _base64(numbers: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}H", *numbers)).decode()


def _rejected(frames: Sequence[Frame], room: int) -> list[str]:
    """The mask values of the candidates that are not read, two bytes each; only in the last frame if room is short."""
    if not frames:
        return []
    wires = frames[-1].wires
    each = (sum(map(len, wires.candidates)) - len(wires.edges)) * 8 // 3
    left = room - sum(6 * len(frame.wires.edges) for frame in frames)
    shown = len(frames) if each * len(frames) <= left else int(each <= room)
    empty = len(frames) - shown
    return [""] * empty + [_base64(list(_values(frame.wires))) for frame in frames[empty:]]


def _values(wires: Wires) -> Iterator[int]:
    """The mask values of all rejected candidates, in order of modules and candidates."""
    for module in range(len(wires.sources)):
        yield from (round(value * 65535) for _, value in wires.rejected(module))


def _some(frames: Sequence[Frame], room: int) -> list[Frame]:
    """All frames if they fit; otherwise some at even distances, with the first and the last."""
    latest = list({frame.epoch: frame for frame in frames}.values())  # the frozen wiring replaces the top-K
    if not latest:
        return []
    each = 6 * len(latest[0].wires.edges)  # 4 bytes per edge, as base64
    count = min(len(latest), max(2, room // max(1, each)))
    if count < 2:
        return latest[-1:]
    return [latest[round(i * (len(latest) - 1) / (count - 1))] for i in range(count)]
