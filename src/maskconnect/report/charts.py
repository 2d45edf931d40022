"""The charts as data: `plot.py` draws them as SVG for the page, `figures.py` with matplotlib for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from maskconnect.report.chart import Chart, Line
from maskconnect.report.groups import Group
from maskconnect.report.history import Epoch, Run
from maskconnect.report.wires import Wires
from maskconnect.training.statistics import statistic

MOST_SCALES = 8
"""The number of layers in the chart of activation scales."""


def curves(run: Run) -> list[Chart]:
    """The curves of training; charts without any value are left out."""
    epochs, bands = run.epochs, run.bands

    def line(name: str, value: Callable[[Epoch], float | None]) -> Line:
        return Line(name=name, x=tuple(e.epoch for e in epochs), y=tuple(map(value, epochs)))

    def chart(key: str, title: str, y: str, *lines: Line, log: bool = False, ordered: bool = False) -> Chart:
        shown = tuple(line for line in lines if any(value is not None for value in line.y))
        most, whole = 100.0 if y == "%" else None, y == "connections"
        found = Chart(key=key, title=title, x="epoch", y=y, lines=shown, bands=bands, most=most, whole=whole)
        return replace(found, log=log, ordered=ordered)

    found = [
        chart("loss", "Loss", run.loss, line("train", lambda e: e.loss), line("test", lambda e: e.test_loss)),
        chart(
            "accuracy",
            "Accuracy",
            "%",
            line("train", lambda e: e.accuracy),
            line("test", lambda e: e.test_top1),
            line("validation", lambda e: e.validation_top1),
        ),
        *(chart(f"value-{name}", _words(name), _words(name), *_more(name, line)) for name in _names(epochs)),
        chart(
            "rates",
            "Learning rates",
            "learning rate",
            line("weights", lambda e: e.lr or None),
            line("masks", lambda e: e.mask_lr or None),
            line("masks, with decay", _decayed),
            log=True,
        ),
        chart("entropy", "Mask entropy (1 = undecided)", "relative to uniform", line("entropy", lambda e: e.entropy)),
        chart("changes", "Top-K changes per epoch", "connections", line("changed", lambda e: e.changes)),
        chart(
            "scales",
            "Activation scale by depth",
            "root mean square",
            *(line(_layer_name(run, layer), _scale(layer)) for layer in _some_layers(run)),
            log=True,
            ordered=True,
        ),
    ]
    return [chart for chart in found if not chart.empty]


def _names(epochs: Sequence[Epoch]) -> list[str]:
    """The names of all other values that a training loop has recorded."""
    return sorted({name for e in epochs for name in e.more})


def _words(name: str) -> str:
    return name.replace("_", " ")


def _more(name: str, line: Callable[[str, Callable[[Epoch], float | None]], Line]) -> list[Line]:
    return [
        line(part, lambda e, i=i: e.more.get(name, (None, None))[i])  # type: ignore[misc]
        for i, part in enumerate(("train", "test"))
    ]


def _decayed(e: Epoch) -> float | None:
    """The learning rate that mask updates use, where `decay` makes it smaller than mask_lr."""
    return None if e.mask_decay is None or not e.mask_lr else e.mask_lr * e.mask_decay or None


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
    """Test accuracy after every epoch, one line per group."""
    lines = tuple(_over_epochs(group, lambda e: e.test_top1) for group in groups)
    shown = tuple(line for line in lines if line.x)
    bands = {run.bands for group in groups for run in group.runs}
    same = bands.pop() if len(bands) == 1 else ()
    chart = Chart(key="accuracies", title="Test accuracy", x="epoch", y="%", lines=shown, bands=same, most=100.0)
    shaded = _seeds(lines) and not chart.is_strip
    return replace(chart, note="Shaded areas are standard deviations over seeds." * shaded)


def _over_epochs(group: Group, value: Callable[[Epoch], float | None]) -> Line:
    at: dict[int, list[float]] = {}
    for run in group.shown:
        for e in run.epochs:
            if (found := value(e)) is not None:
                at.setdefault(e.epoch, []).append(found)
    return _line(group.label, sorted(at.items()))


def _seeds(lines: Iterable[Line]) -> bool:
    """Whether any value is the mean of several seeds."""
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
    """Active branches by depth, one line per K (figures 5 and 6); None where no network has branches."""
    branched = [(label, found) for label, found in _wirings(groups) if found[0].layout.layered]
    if not branched:
        return None
    lines = [
        _line(label, _over_runs([wires.active_by_layer for wires in found]), points=True) for label, found in branched
    ]
    unit = " or ".join(sorted({found[0].unit for _, found in branched}))
    return Chart(
        key="branching",
        title="Active branches by depth",
        x=f"{unit}, from the input",
        y="branches that reach the output",
        lines=tuple(lines),
        whole=True,
        note=f"Every branch of the last {unit} reaches the output.",
    )


def _wirings(groups: Sequence[Group]) -> Iterator[tuple[str, list[Wires]]]:
    """Each stack of each group, with its wiring in every run."""
    for group in groups:
        for number, stack in enumerate(group.first.stacks):
            label = ", ".join(filter(None, [group.label, stack.name]))
            yield label, [run.stacks[number].wires for run in group.shown]


def _over_runs(counts: Sequence[Sequence[int]]) -> list[tuple[float, list[float]]]:
    """The counts of all runs at every place."""
    return [(float(place), list(map(float, at))) for place, at in enumerate(zip(*counts, strict=True))]


def readers(groups: Sequence[Group]) -> Chart | None:
    """The number of blocks that read each block of a chain; None where no network is a chain."""
    chains = [(label, found) for label, found in _wirings(groups) if not found[0].layout.layered]
    lines = [
        _line(label, _over_runs([wires.readers for wires in found])[:-1], points=True)  # the last feeds the output
        for label, found in chains
    ]
    if not any(line.x for line in lines):
        return None
    last = "the last block feeds the output."
    unread = f"A block that no block reads can be pruned; {last}"
    return Chart(
        key="readers",
        title="Readers of each block",
        x="block, from the input",
        y="blocks that read it",
        lines=tuple(lines),
        whole=True,
        note="The output also reads every block." if any(w[0].layout.all_out for _, w in chains) else unread,
    )


def fan_in(groups: Sequence[Group]) -> Chart | None:
    """Test accuracy against K, with standard deviations (figures 2 and 3); None where there is only one K."""
    by_kind: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        k = group.first.fan_in
        if k is None or group.accuracy is None:
            continue
        for run in group.ended:
            if run.test_accuracy is not None:
                by_kind.setdefault(group.kind, {}).setdefault(k, []).append(run.test_accuracy)
    if len({k for found in by_kind.values() for k in found}) < 2 or max(map(len, by_kind.values())) < 2:
        return None
    lines = tuple(_line(kind, sorted(found.items()), points=True) for kind, found in by_kind.items())
    return Chart(
        key="fan-in",
        title="Test accuracy against fan-in",
        x="fan-in K",
        y="test accuracy, %",
        lines=lines,
        most=100.0,
        note="Accuracy is that of the last epoch." + " Bars are standard deviations over seeds." * _seeds(lines),
    )
