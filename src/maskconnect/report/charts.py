"""What is plotted, as data: `plot.py` draws it by hand for the page, `figures.py` with matplotlib for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from maskconnect.report.groups import Group
from maskconnect.report.runs import Epoch, Run
from maskconnect.training.statistics import statistic

MOST_SCALES = 8
"""How many layers are shown in the plot of activation scales."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line, or points, of a plot; where y is None there is no point."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    spread: tuple[float | None, ...] = ()  # standard deviations, where there are several seeds
    points: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """A phase, from one epoch to another."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot."""

    key: str  # the name of its file
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    log: bool = False
    ordered: bool = False  # lines follow an order, as colours then do
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see."""
        return not any(value is not None for line in self.lines for value in line.y)


def bands_of(run: Run) -> tuple[Band, ...]:
    """The phases of a run."""
    found, start = [], 0
    for phase in run.recipe.phase:
        found.append(Band(name=phase.name, start=start, end=start + phase.epochs))
        start += phase.epochs
    return tuple(found)


def curves(run: Run) -> list[Chart]:
    """How training went; charts without any value are left out."""
    epochs, bands = run.epochs, bands_of(run)

    def line(name: str, value: Callable[[Epoch], float | None]) -> Line:
        return Line(name=name, x=tuple(e.epoch for e in epochs), y=tuple(map(value, epochs)))

    def chart(key: str, title: str, y: str, *lines: Line, log: bool = False, ordered: bool = False) -> Chart:
        shown = tuple(line for line in lines if any(value is not None for value in line.y))
        return Chart(key=key, title=title, x="epoch", y=y, lines=shown, bands=bands, log=log, ordered=ordered)

    learned = [line("masks", lambda e: e.mask_lr or None)] if run.recipe.learns else []
    found = [
        chart("loss", "Loss", "cross-entropy", line("train", lambda e: e.loss), line("test", lambda e: e.test_loss)),
        chart(
            "accuracy",
            "Accuracy",
            "%",
            line("train", lambda e: e.accuracy),
            line("test", lambda e: e.test_top1),
            line("validation", lambda e: e.validation_top1),
        ),
        chart("rates", "Learning rates", "rate", line("weights", lambda e: e.lr or None), *learned, log=True),
        chart("entropy", "Mask entropy (1: undecided)", "share of uniform", line("entropy", lambda e: e.entropy)),
        chart("changes", "Top-K changes an epoch", "connections", line("changed", lambda e: e.changes)),
        chart(
            "scales",
            "Activation scale, by depth",
            "root mean square",
            *(line(_layer_name(run, layer), _scale(layer)) for layer in _some_layers(run)),
            log=True,
            ordered=True,
        ),
    ]
    return [chart for chart in found if not chart.empty]


def _scale(layer: int) -> Callable[[Epoch], float | None]:
    return lambda e: (e.scales[layer] or None) if layer < len(e.scales) else None


def _some_layers(run: Run) -> list[int]:
    """The first layer, the output, and some between them."""
    count = max((len(e.scales) for e in run.epochs), default=0)
    if count <= MOST_SCALES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_SCALES - 1)) for i in range(MOST_SCALES)})


def _layer_name(run: Run, layer: int) -> str:
    end = len(run.wires.layout.layers)
    return "output" if layer == end else f"into {layer}"


def accuracy_of_all(groups: Sequence[Group]) -> Chart:
    """Test accuracy after every epoch, a line a group."""
    lines = tuple(_over_epochs(group, lambda e: e.test_top1) for group in groups)
    bands = {bands_of(run) for group in groups for run in group.runs}
    same = bands.pop() if len(bands) == 1 else ()
    note = "Shades are standard deviations over seeds." * _seeds(lines)
    return Chart(key="accuracies", title="Test accuracy", x="epoch", y="%", lines=lines, bands=same, note=note)


def _over_epochs(group: Group, value: Callable[[Epoch], float | None]) -> Line:
    at: dict[int, list[float]] = {}
    for run in group.shown:
        for e in run.epochs:
            if (found := value(e)) is not None:
                at.setdefault(e.epoch, []).append(found)
    return _line(group.label, sorted(at.items()))


def _seeds(lines: Iterable[Line]) -> bool:
    """Whether any value is that of several seeds."""
    return any(value is not None for line in lines for value in line.spread)


def _line(name: str, values: Iterable[tuple[float, list[float]]], *, points: bool = False) -> Line:
    found = [(x, statistic(ys)) for x, ys in values]
    return Line(
        name=name,
        x=tuple(x for x, _ in found),
        y=tuple(s.mean for _, s in found),
        spread=tuple(s.deviation for _, s in found),
        points=points,
    )


def branching(groups: Sequence[Group]) -> Chart | None:
    """Active branches by depth, a line a K (figures 5 and 6); None where no network has branches."""
    layered = [group for group in groups if group.first.wires.layout.layered]
    lines = [
        _line(
            group.label,
            [(float(d), list(map(float, at))) for d, at in enumerate(_by_depth(group))],
            points=True,
        )
        for group in layered
    ]
    if not lines:
        return None
    return Chart(
        key="branching",
        title="Active branches by depth",
        x="module, from the input",
        y="branches that reach the output",
        lines=tuple(lines),
        note="Every branch of the last module reaches the output.",
    )


def _by_depth(group: Group) -> list[tuple[int, ...]]:
    return list(zip(*(run.wires.active_by_layer for run in group.shown), strict=True))


def readers(groups: Sequence[Group]) -> Chart | None:
    """How many blocks read each block of a chain; None where no network is one."""
    chains = [group for group in groups if not group.first.wires.layout.layered]
    lines = []
    for group in chains:
        each = zip(*(run.wires.readers for run in group.shown), strict=True)
        values = [(float(block), list(map(float, at))) for block, at in enumerate(each)]
        lines.append(_line(group.label, values[:-1], points=True))  # the last block feeds the output
    if not any(line.x for line in lines):
        return None
    return Chart(
        key="readers",
        title="Blocks that read each block",
        x="block, from the input",
        y="blocks that read it",
        lines=tuple(lines),
        note="What no block reads can be pruned; the last block feeds the classifier.",
    )


def fan_in(groups: Sequence[Group]) -> Chart | None:
    """Test accuracy against K, with standard deviations (figures 2 and 3); None where there is one K only."""
    by_kind: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        k = group.first.fan_in
        if k is None or group.accuracy is None:
            continue
        for run in group.ended:
            assert run.summary is not None
            by_kind.setdefault(group.kind, {}).setdefault(k, []).append(run.summary["test"]["top1"])
    if len({k for found in by_kind.values() for k in found}) < 2 or max(map(len, by_kind.values())) < 2:
        return None
    lines = tuple(_line(kind, sorted(found.items()), points=True) for kind, found in by_kind.items())
    return Chart(
        key="fan-in",
        title="Test accuracy against fan-in",
        x="fan-in K",
        y="test accuracy, %",
        lines=lines,
        note="Accuracy is that of the last epoch." + " Bars are standard deviations over seeds." * _seeds(lines),
    )
