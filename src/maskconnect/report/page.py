"""The page of a report: one file that holds everything it shows, and requests nothing else."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

from maskconnect.report import charts
from maskconnect.report.groups import Group, groups_of
from maskconnect.report.history import Run, Stack
from maskconnect.report.mistakes import confusion_of, matrix, pictures
from maskconnect.report.player import ROOM, player_of
from maskconnect.report.plot import figure
from maskconnect.report.runs import TrainedRun
from maskconnect.report.tables import commands, comparison, environment, facts, table

MARK = '<meta name="generator" content="maskconnect report">'
"""The mark by which a later report knows that it may replace this page."""

PICTURES, CLASSES, CONFUSIONS = 12, 20, 8
"""The number of mistakes, of worst classes, and of most common confusions that a run shows."""

WIDE = 12
"""A confusion matrix with more classes than this takes the whole width."""

NO_SCRIPT = (
    "JavaScript is off: the drawings of wirings are missing, and charts show no values of points. "
    "Unless --no-figures is given, maskconnect report also writes the drawings as files."
)

AXES = "Vertical axes span the values shown, so most do not start at 0."

MASK = (
    "Mask value: how strongly a block prefers one candidate over the others. The values of all its candidates add up "
    "to 1, and the K largest are used."
)

TOTAL_PICTURES = 96
"""The number of mistakes on the whole page, divided among the runs."""


def page(runs: Sequence[Run]) -> str:
    """Return the whole page."""
    groups = groups_of(runs)
    several = len(runs) > 1
    count = sum(len(run.stacks) for run in runs)
    data = [player_of(run, ROOM // count, number) for run in runs for number in range(len(run.stacks))]
    firsts = list(accumulate((len(run.stacks) for run in runs), initial=0))  # the first player of each run
    most = max(4, min(PICTURES, TOTAL_PICTURES // len(runs)))
    titles = _titles(runs, groups)
    shown = next((number for number, run in enumerate(runs) if run.learns), 0)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta name="color-scheme" content="light dark">{MARK}',
        f"<title>{html.escape(_title(runs))}</title><style>{_asset('page.css')}</style></head><body>",
        f"<header><h1>{html.escape(_title(runs))}</h1><p>{html.escape(_subtitle(runs))}</p></header><main>",
        f"<noscript><p class=note>{html.escape(NO_SCRIPT)}</p></noscript>",
        _side_by_side(groups) if several else "",
        _chooser(runs, titles, shown) if several else "",
        *(
            _run(run, number, firsts[number], title=title if several else "", most=most)
            for number, (run, title) in enumerate(zip(runs, titles, strict=True))
        ),
        "</main><div id=tip hidden></div>",
        f'<script type="application/json" id=runs>{_json(data)}</script>',
        f"<script>{_asset('page.js')}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _asset(name: str) -> str:
    return (files("maskconnect.report") / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _title(runs: Sequence[Run]) -> str:
    networks, sets = {run.network for run in runs}, {run.data for run in runs}
    what = f"{runs[0].network}" if len(networks) == 1 else f"{len(networks)} networks"
    where = f" on {runs[0].data}" if len(sets) == 1 and runs[0].data else ""
    return f"{runs[0].wiring}: {what}{where}" if len(runs) == 1 else f"{len(runs)} runs of {what}{where}"


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return "Accuracies are those of the last epoch, unless a column says otherwise."
    return runs[0].about


def _side_by_side(groups: Sequence[Group]) -> str:
    plots = [charts.fan_in(groups), charts.accuracy_of_all(groups), charts.branching(groups), charts.readers(groups)]
    shown = "".join(figure(chart) for chart in plots if chart is not None and not chart.empty)
    spread = any(len(group.ended) > 1 for group in groups)
    data = dict.fromkeys(run.data for group in groups for run in group.runs if run.data)
    unknown = "; the data of recorded runs is unknown" * any(not run.data for group in groups for run in group.runs)
    of = f"Accuracies are on {html.escape(' and '.join(data))}{unknown}." if data else ""
    note = f"<p class=note>{of}{' ± is the standard deviation over seeds.' * spread}</p>" if of or spread else ""
    drawn = f"<div class=charts>{shown}</div><p class=note>{AXES}</p>" if shown else ""
    return f"<section><h2>Side by side</h2>{comparison(groups)}{note}{drawn}</section>"


def _titles(runs: Sequence[Run], groups: Sequence[Group]) -> list[str]:
    """A heading for each run among others: the label of its group, and its seed."""
    label = {id(run): group.label for group in groups for run in group.runs}
    seeds = [f", seed {run.recipe.seed}" if isinstance(run, TrainedRun) else "" for run in runs]
    return [f"{label[id(run)]}{seed}" for run, seed in zip(runs, seeds, strict=True)]


def _chooser(runs: Sequence[Run], titles: Sequence[str], shown: int) -> str:
    often = Counter(run.name for run in runs)
    folders = [run.name if often[run.name] == 1 else str(run.path) for run in runs]
    names = [f"{title} — {path}" for title, path in zip(titles, folders, strict=True)]
    options = "".join(
        f"<option value={number}{' selected' * (number == shown)}>{html.escape(name)}</option>"
        for number, name in enumerate(names)
    )
    return f"<nav class=chooser><label for=choose>One run</label> <select id=choose>{options}</select></nav>"


def _run(run: Run, number: int, player: int, *, title: str, most: int) -> str:
    """Everything about one run; the only one has no title."""
    shown = "".join(figure(chart) for chart in charts.curves(run))
    if not title:
        alone = groups_of([run])
        own = [charts.branching(alone), charts.readers(alone)]
        shown += "".join(figure(chart) for chart in own if chart is not None)
    cards = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts(run)
    )
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    training = f"<h3>Training</h3><div class=charts>{shown}</div><p class=note>{AXES}</p>" if shown else ""
    players = "".join(_player(run, stack, player + i) for i, stack in enumerate(run.stacks))
    return (
        f"<section class=run data-run={number}>{heading}<dl class=facts>{cards}</dl>"
        f"<h3>Wiring</h3>{players}{_legend(run)}{training}{_mistakes(run, most)}{_origin(run)}</section>"
    )


def _player(run: Run, stack: Stack, number: int) -> str:
    """The elements that the script fills."""
    plain = stack.plain
    beside = (
        f"<figure class=view><figcaption>{html.escape(f'{plain.name}, {plain.words}')}</figcaption>"
        "<svg class=usual></svg></figure>"
        if plain is not None
        else ""
    )
    controls = (
        '<div class=controls><button type=button class=play aria-label="Play training">▶</button>'
        f"<div class=track><div class=phases></div><input type=range min=0 max={run.done} value={run.done} "
        'step=1 aria-label="Epoch"></div><output></output></div>'
        if stack.wires.learned and run.done
        else ""
    )
    title = f"<h4>{html.escape(stack.name)}</h4>" if stack.name else ""
    return (
        f"<div class=player data-player={number}>{title}{controls}<p class=count role=status></p><div class=views>"
        f"<figure class=view><figcaption>{html.escape(run.wiring)}</figcaption><svg class=wiring></svg></figure>"
        f"{beside}<aside class=panel aria-live=polite></aside></div></div>"
    )


def _legend(run: Run) -> str:
    lines = "Each line is a connection; stronger lines have larger mask values. " if run.learns else ""
    return (
        f"<p class=note>{lines}Dashed blocks cannot reach the output, and pruning removes them. "
        "<span class=mouse>Point at a block to see its sources. Click it to mark every block that feeds it or that it "
        "feeds. The arrow keys, Enter and Escape do the same.</span>"
        "<span class=touch>Tap a block to see its sources, and to mark every block that feeds it or that it feeds. "
        "Tap it again to release it.</span></p>" + (f"<p class=note>{MASK}</p>" if run.learns else "")
    )


def _mistakes(run: Run, most: int) -> str:
    if run.tested is None or not len(run.tested.label_N):
        return ""
    confusion = confusion_of(run.tested, run.classes)
    names = run.classes
    ranked = sorted(
        ((accuracy, name) for accuracy, name in zip(confusion.accuracies, names, strict=True) if accuracy is not None),
        key=lambda item: item[0],
    )
    bars = "".join(
        f"<li><span title='{html.escape(name)}'>{html.escape(name)}</span>"
        f"<i style='--share:{accuracy:.1f}%'></i><b>{accuracy:.1f}</b></li>"
        for accuracy, name in ranked[:CLASSES]
    )
    rest = f", the {CLASSES} worst of {len(ranked)}" if len(ranked) > CLASSES else ""
    worst = table(
        ("true", "predicted", "images"),
        [(names[t], names[p], str(count)) for t, p, count in confusion.worst(CONFUSIONS)],
        words=2,
    )
    shown = pictures(run.tested, names, most)
    wrong = f"<h4>Most confident mistakes</h4>{shown}" if shown else ""
    return (
        f"<h3>Predictions on {len(run.tested.label_N):,} test images</h3><div class=mistakes>"
        f"<div{' class=big' * (len(names) > WIDE)}><h4>Confusion</h4>{matrix(confusion)}</div>"
        f"<div><h4>Accuracy by class, %{rest}</h4><ul class=bars>{bars}</ul></div>"
        f"<div class=confusions><h4>Most common confusions</h4>{worst}</div></div>{wrong}"
    )


def _origin(run: Run) -> str:
    """How the run was made: commands, recipe, environment."""
    known = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in environment(run))
    found = f"<details><summary>Environment</summary><dl class=origin>{known}</dl></details>" if known else ""
    if not isinstance(run, TrainedRun):
        return f"<h3>Origin</h3>{found}" if found else ""
    typed = "".join(
        f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(text)}</code></dd>" for name, text in commands(run)
    )
    return (
        f"<h3>Origin</h3><dl class=origin>{typed}</dl>"
        f"<details><summary>Recipe</summary><pre>{html.escape(run.written)}</pre></details>{found}"
    )
