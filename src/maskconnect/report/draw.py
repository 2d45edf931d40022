"""`mc.draw`: the wiring of a model as a picture, in a notebook or in a file."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from maskconnect.core.loop import masks_of, wiring_of
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError
from maskconnect.report.drawing import Drawing, Panel
from maskconnect.report.wires import wires_of

KINDS = (".svg", ".png")
NOTE = "Stronger lines have larger real masks. Dashed blocks cannot reach the output."


def draw(model: nn.Module, path: str | os.PathLike[str] | None = None) -> Drawing:
    """Draw the wiring of every stack in a model: what is frozen, or the top-K of masks that are still learned.

    Args:
        model: any model with `mc.MaskedStack`s in it, before it is pruned.
        path: a file to write, .svg or .png (which needs matplotlib); an older one is replaced.

    Returns:
        The drawing. A notebook shows it; its `svg` is the text of the picture.
    """
    place = None if path is None else Path(path)
    if place is not None and place.suffix.lower() not in KINDS:
        raise ConfigError(f"path is {str(place)!r}; a drawing is written as {' or '.join(KINDS)}.")
    wiring_of(model)  # which says what is wrong where there is nothing to draw
    if any(masks.real.is_meta for masks in masks_of(model)):
        raise ConfigError(
            "the masks are on the meta device, where they have no values; draw the model before, or after."
        )
    stacks = [(name, part) for name, part in model.named_modules() if isinstance(part, MaskedStack)]
    panels = tuple(Panel(_title(name, stack, alone=len(stacks) == 1), wires_of(stack.masks)) for name, stack in stacks)
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
