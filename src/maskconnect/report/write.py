"""The folder of a report: the page, and the figures beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maskconnect.errors import ConfigError, MaskConnectError
from maskconnect.reading import read_bytes
from maskconnect.report import charts, figures
from maskconnect.report.drawing import NOTE, Drawing, Panel, write
from maskconnect.report.groups import groups_of
from maskconnect.report.history import Run
from maskconnect.report.mistakes import confusion_of
from maskconnect.report.page import MARK, page
from maskconnect.training.files import TEMPORARY, is_unfinished, write_atomically

PAGE, FIGURES, LIST = "index.html", "figures", "made_by_maskconnect.txt"
LONGEST = 60
"""The number of letters of a run's name that the names of its figures may have."""


def check_place(out: Path) -> None:
    """Raise an error if the report would overwrite anything except an older report."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another folder with --out.")
    if (out / "recipe.toml").exists():
        raise ConfigError(f"{out} is the folder of a run; choose another folder with --out.")
    found = out / PAGE
    if found.exists():
        if MARK not in read_bytes(found)[:8000].decode(errors="replace")[:2000]:
            raise ConfigError(f"{found} is not a report of maskconnect; choose another folder with --out.")
    elif out.exists() and not all(map(is_unfinished, out.iterdir())):
        raise ConfigError(f"{out} is not empty and holds no report; choose another folder with --out.")


def write_page(runs: Sequence[Run], out: Path) -> Path:
    """Write the page; an older one is replaced."""
    check_place(out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / PAGE, page(runs).encode("utf-8", "backslashreplace"))
    return out / PAGE


def write_figures(runs: Sequence[Run], out: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the figures; those of an older report are replaced once all are drawn, and no other file changes."""
    with tempfile.TemporaryDirectory(dir=out, prefix=TEMPORARY) as place:
        try:
            for figure in _figures(runs, Path(place)):
                say(f"drawing {figure}")
        except MaskConnectError as error:  # without matplotlib, the drawings are still written as SVG
            say(f"other figures are left out: {error}")
        remove_figures(out)
        folder = out / FIGURES
        folder.mkdir(exist_ok=True)
        made = sorted(Path(place).iterdir())
        write_atomically(folder / LIST, "".join(f"{path.name}\n" for path in made).encode("utf-8", "surrogateescape"))
        return [path.replace(folder / path.name) for path in made]


def remove_figures(out: Path) -> None:
    """Remove the figures of an older report, which its list names."""
    folder = out / FIGURES
    try:
        names = read_bytes(folder / LIST).decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for name in names:
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    (folder / LIST).unlink(missing_ok=True)


def _figures(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Write the figures one by one, and yield the name of each before it is drawn."""
    names = _names(runs)
    for run, name in zip(runs, names, strict=True):
        write(drawing_of(run), folder / f"wiring{name}.svg")
    groups = groups_of(runs)
    together = [charts.fan_in(groups), charts.branching(groups), charts.readers(groups)]
    if len(runs) > 1:
        together.append(charts.accuracy_of_all(groups))
    for chart in together:
        if chart is not None and not chart.empty:
            yield chart.key
            figures.write_chart(chart, folder / chart.key)
    for run, name in zip(runs, names, strict=True):
        yield f"wiring{name}"
        write(drawing_of(run), folder / f"wiring{name}.png")
        if curves := charts.curves(run):
            yield f"curves{name}"
            figures.write_charts(curves, folder / f"curves{name}")
        if run.tested is not None and len(run.tested.label_N):
            yield f"confusion{name}"
            figures.write_confusion(confusion_of(run.tested, run.classes), folder / f"confusion{name}")


def drawing_of(run: Run) -> Drawing:
    """The wiring of a run, beside that of the plain network (figure 4)."""
    panels = []
    for stack in run.stacks:
        if stack.plain is not None:
            panels.append(Panel(stack.plain.name, stack.plain.wires))
        panels.append(Panel(f"{stack.name}: {run.wiring}" if stack.name else run.wiring, stack.wires))
    return Drawing(tuple(panels), NOTE)


def _names(runs: Sequence[Run]) -> list[str]:
    """The ending of the file names of each run: empty if there is only one run, otherwise the name of its folder."""
    if len(runs) == 1:
        return [""]
    found: list[str] = []
    for run in runs:
        name = f"-{run.name[:LONGEST]}"
        found.append(next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(runs) + 1))) if n not in found))
    return found
