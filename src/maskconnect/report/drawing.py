"""`mc.draw`: wirings as one self-contained SVG picture, for a README, a notebook or a paper."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from maskconnect.core.lookup import masks_of, wiring_of
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError
from maskconnect.report.scene import Scene
from maskconnect.report.wires import Edge, Wires, wires_of

KINDS = (".svg", ".png")
NOTE = "Stronger lines have larger mask values. Dashed blocks cannot reach the output."
GAP, MARGIN, HEAD, FOOT = 36, 16, 34, 30

STYLE = """\
.maskconnect text{font:11px system-ui,sans-serif;fill:#57606a}
.maskconnect .title{font-size:14px;font-weight:600;fill:#1f2328}
.maskconnect .paper{fill:#fff}
.maskconnect .block rect{fill:#fff;stroke:#1f2328;stroke-width:1.4}
.maskconnect .unused rect{stroke:#8c959f;stroke-width:1;stroke-dasharray:3 2}
.maskconnect path{fill:none;stroke:#0072b2;stroke-linecap:round}
.maskconnect path.end{stroke:#8c959f;stroke-width:1}
.maskconnect path.lost{stroke:#8c959f;stroke-dasharray:2 3}
@media(prefers-color-scheme:dark){
.maskconnect text{fill:#9198a1}
.maskconnect .title{fill:#f0f6fc}
.maskconnect .paper{fill:#0d1117}
.maskconnect .block rect{fill:#0d1117;stroke:#f0f6fc}
.maskconnect .unused rect{stroke:#656c76}
.maskconnect path{stroke:#56b4e9}
.maskconnect path.end,.maskconnect path.lost{stroke:#656c76}
}"""

KINDS_STYLE = """\
.maskconnect .block text{fill:#1f2328;text-anchor:middle}
.maskconnect .unused text{fill:#57606a}
@media(prefers-color-scheme:dark){
.maskconnect .block text{fill:#f0f6fc}
.maskconnect .unused text{fill:#9198a1}
}"""
"""Added where blocks have kinds."""


@dataclass(frozen=True)
class Panel:
    """One wiring with its title."""

    title: str
    wires: Wires

    @property
    def scene(self) -> Scene:
        """The positions of blocks and wires."""
        return self.wires.scene

    @property
    def width(self) -> int:
        """The width of the drawing, or of its title."""
        longest = max((edge.target - edge.source for edge in self.wires.edges), default=0)
        drawn = self.scene.width if self.wires.layout.layered else self.scene.reach(longest)
        return max(drawn, _text_width(self.title, 7.6))


@dataclass(frozen=True)
class Drawing:
    """Wirings side by side. A notebook displays it; `svg` is its source."""

    panels: tuple[Panel, ...]
    note: str = ""

    @property
    def width(self) -> int:
        """In pixels."""
        places = sum(panel.width for panel in self.panels)
        return max(2 * MARGIN + places + GAP * (len(self.panels) - 1), 2 * MARGIN + _text_width(self.note, 5.7))

    @property
    def height(self) -> int:
        """In pixels."""
        return MARGIN + HEAD + max(panel.scene.height for panel in self.panels) + (FOOT if self.note else MARGIN)

    @property
    def svg(self) -> str:
        """The source of the picture."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        name = html.escape("; ".join(panel.title for panel in self.panels), quote=True)
        style = f"{STYLE}\n{KINDS_STYLE}" if any(panel.wires.kinds for panel in self.panels) else STYLE
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="maskconnect" {size} role="img" aria-label="{name}">',
            f"<style>\n{style}\n</style>",
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>',
        ]
        for x, panel in self.places():
            lines += [f'<g transform="translate({x} {MARGIN})">', *_panel(panel), "</g>"]
        if self.note:
            lines.append(f'<text x="{MARGIN}" y="{self.height - 12}">{html.escape(self.note)}</text>')
        return "\n".join([*lines, "</svg>", ""])

    def places(self) -> Iterator[tuple[int, Panel]]:
        """Each panel, after its left edge."""
        x = MARGIN
        for panel in self.panels:
            yield x, panel
            x += panel.width + GAP

    def _repr_svg_(self) -> str:
        return self.svg


def _panel(panel: Panel) -> Iterator[str]:
    scene, wires = panel.scene, panel.wires
    yield f'<text class="title" x="0" y="14">{html.escape(panel.title)}</text>'
    yield f'<g transform="translate(0 {HEAD})">'
    yield f'<path class="end" d="{scene.ends()}"/>'
    yield from (_wire(wires, scene, edge) for edge in _faintest_first(wires.edges))
    for word, y in (("input", 10), ("output", scene.height - 2)):
        yield f'<text x="{scene.middle}" y="{y}" text-anchor="middle">{word}</text>'
    for layer, members in scene.numbered():
        yield f'<text x="{LABEL}" y="{scene.ys[members.start] + 4}" text-anchor="end">{layer}</text>'
    yield from (_block(wires, scene, k) for k in range(len(wires.alive)))
    yield "</g>"


def _block(wires: Wires, scene: Scene, k: int) -> str:
    x, y = scene.xs[k], scene.ys[k]
    place = f'x="{x - scene.wide // 2}" y="{y - scene.side // 2}" width="{scene.wide}" height="{scene.side}"'
    label = f'<text x="{x}" y="{y + 4}">{html.escape(scene.labels[k])}</text>' if scene.labels else ""
    look = "block" if wires.alive[k] else "block unused"
    title = f"<title>{html.escape(describe(wires, k), quote=False)}</title>"
    return f'<g class="{look}">{title}<rect {place} rx="{max(2, scene.side // 6)}"/>{label}</g>'


LABEL = 30
"""The right edge of the row numbers."""


def describe(wires: Wires, k: int) -> str:
    """A block and its sources, in words."""
    read = [f"{_short(wires, s)} ({v:.2f})" for s, v in _sources(wires, k)]
    reads = f"reads {', '.join(read)}" if read else "reads the input"
    kind, name = wires.kinds[k] if wires.kinds else "", wires.layout.name(k)
    return f"{f'{kind} ({name})' if kind else name} {reads}" + (
        "" if wires.alive[k] else "; it cannot reach the output"
    )


def _short(wires: Wires, k: int) -> str:
    """A source: its number, after its kind."""
    number = f"{wires.layout.places[k][1] if wires.layout.layered else k}"
    return f"{wires.kinds[k]} {number}".strip() if wires.kinds else number


def _sources(wires: Wires, k: int) -> Iterator[tuple[int, float]]:
    return zip(wires.sources[k], wires.values[k], strict=True)


def _wire(wires: Wires, scene: Scene, edge: Edge) -> str:
    alive = wires.alive[edge.target]
    faint = opacity(edge.strength) * fading(wires) * (1 if alive else 0.5)
    look = f'stroke-opacity="{faint:.2f}" stroke-width="{thickness(edge.strength, wires):.2f}"'
    kind = "" if alive else ' class="lost"'
    return f'<path{kind} d="{scene.path(edge.source, edge.target)}" {look}/>'


def opacity(strength: float) -> float:
    """The opacity of a connection: more for a larger mask value."""
    return 0.3 + 0.65 * strength


def thickness(strength: float, wires: Wires) -> float:
    """The width of a connection; thinner where many run side by side."""
    return (1.0 + 1.2 * strength) * thinning(wires)


def thinning(wires: Wires) -> float:
    """The factor for the width of wires: 1 where there is room, down to 0.4 where many run side by side."""
    fan_in = len(wires.edges) / max(1, len(wires.layout.targets))
    beside = 2.4 / math.sqrt(fan_in) if fan_in else 1.0
    return max(0.4, min(1.0, beside) * min(1.0, wires.scene.side / 14))


def fading(wires: Wires) -> float:
    """The factor for the opacity of wires: 1 for a few hundred, less for more, which would hide each other."""
    return max(0.4, min(1.0, math.sqrt(300 / max(1, len(wires.edges)))))


def _faintest_first(edges: Sequence[Edge]) -> list[Edge]:
    return sorted(edges, key=lambda edge: edge.strength)


def _text_width(text: str, letter: float) -> int:
    """The approximate width of a line: an SVG file cannot measure its text."""
    return int(len(text) * letter)


def draw(model: nn.Module, path: str | os.PathLike[str] | None = None) -> Drawing:
    """Draw the wiring of every stack in a model: the frozen wiring, or the top-K of masks that still learn.

    A block shows the `kind` of its module, as the blocks of `mc.mixed` do. In your own stack, set it first:
    `module.kind = "attention"`. If no module has one, blocks of different classes show the names of their classes.

    Args:
        model: any model with `mc.MaskedStack`s in it, before it is pruned.
        path: a file to write, .svg or .png (which needs matplotlib); an older one is replaced.

    Returns:
        The drawing. A notebook shows it; its `svg` is the text of the picture.
    """
    place = None if path is None else Path(path)
    if place is not None and place.suffix.lower() not in KINDS:
        raise ConfigError(f"path is {str(place)!r}; a drawing is written as {' or '.join(KINDS)}.")
    wiring_of(model)  # raises an error if there is nothing to draw
    if any(masks.real.is_meta for masks in masks_of(model)):
        raise ConfigError(
            "the masks are on the meta device, where they have no values; move the model to a real device first."
        )
    stacks = [(name, part) for name, part in model.named_modules() if isinstance(part, MaskedStack)]
    panels = tuple(Panel(_title(name, stack, alone=len(stacks) == 1), wires_of(stack)) for name, stack in stacks)
    drawing = Drawing(panels, NOTE)
    if place is not None:
        try:
            write(drawing, place)
        except OSError as error:
            raise ConfigError(f"{place} cannot be written: {error.strerror}; choose another path.") from None
    return drawing


def write(drawing: Drawing, place: Path) -> None:
    """Write a drawing to a file."""
    if place.suffix.lower() == ".svg":
        place.write_text(drawing.svg, encoding="utf-8", errors="backslashreplace")
    else:
        from maskconnect.report.figures import write_drawing

        write_drawing(drawing, place)


def _title(name: str, stack: MaskedStack, *, alone: bool) -> str:
    what = "" if alone or not name else f"{name}: "
    return what + _state(stack.masks)


def _state(masks: ConnectivityMasks) -> str:
    state = "fixed" if not masks.learned else "learned" if masks.is_frozen else "being learned"
    counts = masks.fan_in.tolist()
    if not counts:
        return state
    most = max(counts)
    usual = all(k == min(most, len(masks.candidates[t])) for t, k in zip(masks.layout.targets, counts, strict=True))
    return f"{state}, K={most}" if usual else f"{state}, K={min(counts)} to {most}"
