"""The architecture that a run found: the kinds of branches that were kept, their wiring, their code, a picture.

For networks whose modules have kinds, such as `mc.mixed`. Layers and branches are numbered as in the code and in the
picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maskconnect.cli.table import show_table
from maskconnect.cli.verb import say

if TYPE_CHECKING:
    from torch import nn

    from maskconnect.report.wires import Wires
    from maskconnect.ship.saved import Saved

PICTURE = "wiring.svg"


def show_architecture(folder: Path, *, code: bool = True) -> None:
    """Print the architecture of a finished run, check that pruning it changes no output, and write its picture."""
    try:
        _show(folder, code)
    except Exception as error:  # the run itself has succeeded
        say(f"the architecture cannot be shown: {error or type(error).__name__}")


def _show(folder: Path, code: bool) -> None:
    from maskconnect.report.drawing import draw
    from maskconnect.ship.trained import from_run

    saved = from_run(folder)
    drawing = draw(saved.network)
    show_wiring(drawing.panels[0].wires)
    network, words = pruned(saved)
    print(f"\n{words}")
    if code:
        print(f"\nIts code:\n\n{readable(str(network.code))}\n")
    write_picture(drawing.svg, folder / PICTURE)


def show_wiring(wires: Wires) -> None:
    """Print which branches of each layer were kept, which were removed, and what the kept ones read."""
    print("\nThe architecture:\n")
    show_table(("layer", "kept", "removed"), list(layers_of(wires)))
    print()
    for line in reading_of(wires):
        say(line)


def layers_of(wires: Wires) -> Iterator[tuple[str, str, str]]:
    """Yield for each layer its number, the branches that reach the output, and the others."""
    names = names_of(wires)
    for layer, members in enumerate(wires.layout.layers):
        kept, removed = (", ".join(names[k] for k in members if wires.alive[k] is on) for on in (True, False))
        yield str(layer), kept, removed


def reading_of(wires: Wires) -> Iterator[str]:
    """Yield for each branch that was kept what it reads."""
    names, wide = names_of(wires), max(map(len, names_of(wires)))
    for k, sources in enumerate(wires.sources):
        if wires.alive[k]:
            read = " + ".join(names[s] if wires.layout.layered else f"{s} {names[s]}" for s in sources)
            yield f"layer {wires.layout.places[k][0]}  {names[k]:{wide}}  reads {read or 'the stem'}"


def names_of(wires: Wires) -> list[str]:
    """Name each branch by its kind, and by its number if its layer has several of that kind."""
    found = [""] * len(wires.kinds)
    for members in wires.layout.layers:
        kinds = [wires.kinds[k] for k in members]
        for branch, (k, kind) in enumerate(zip(members, kinds, strict=True)):
            found[k] = kind if kind and kinds.count(kind) == 1 else f"{kind or 'branch'} ({branch})"
    return found


def pruned(saved: Saved) -> tuple[nn.Module, str]:
    """Return the network without the removed branches, and a sentence that says what this changed."""
    from maskconnect.core.lookup import masks_of
    from maskconnect.pruning.prune import pruned_parameters
    from maskconnect.ship.pruning import prune_saved

    after, difference = prune_saved(saved, fold=False, merge=False)
    alive = [on for masks in masks_of(saved.network) for on in masks.current_wiring().alive]
    count = pruned_parameters(saved.network)
    same = "are bitwise identical" if not difference else f"differ by at most {difference:.1e} of the largest"
    return after.network, (
        f"Pruned: {len(alive)} blocks -> {sum(alive)}, {count.weights:,} parameters -> {count.transitive:,}. "
        f"The outputs of both networks {same}."
    )


def readable(code: str) -> str:
    """Make the code of a `torch.fx` graph readable: delete no names after use; write parts and slices with []."""
    code = re.sub(r";  (?:\w+ = )+None$", "", code, flags=re.MULTILINE)
    code = re.sub(r"\[\(((?:slice\(None, None, \w+\)(?:, )?)+)\)\]", lambda found: f"[{_slices(found[1])}]", code)
    before = None
    while before != code:  # from the inside out
        before, code = code, re.sub(r'getattr\(([^()]*), ("\w+")\)', r"\1[\2]", code)
    return code.strip()


def _slices(text: str) -> str:
    return re.sub(r"slice\(None, None, (\w+)\)", lambda found: ":" if found[1] == "None" else f"::{found[1]}", text)


def write_picture(svg: str, place: Path) -> None:
    """Write the picture completely or not at all, and print where it is, or why it is missing."""
    from maskconnect.training.files import write_atomically

    try:
        write_atomically(place, svg.encode("utf-8", "backslashreplace"))
    except OSError as error:
        say(f"no picture: {place} cannot be written: {error.strerror}")
    else:
        say(f"picture: {place}")
