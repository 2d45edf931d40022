"""The page of a report: one file with everything in it, which opens from a disk and asks for nothing else."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from maskconnect.recipes.naming import WIRINGS, data_name, data_names
from maskconnect.report import charts
from maskconnect.report.groups import Group, groups_of
from maskconnect.report.mistakes import confusion_of, matrix, pictures
from maskconnect.report.player import ROOM, player_of
from maskconnect.report.plot import figure
from maskconnect.report.runs import Run
from maskconnect.report.tables import commands, comparison, environment, facts, table
from maskconnect.report.wires import usual_wires

MARK = '<meta name="generator" content="maskconnect report">'
"""By this a later report knows that it may replace this one."""

PICTURES, CLASSES, CONFUSIONS = 12, 20, 8
"""How many mistakes, worst classes and commonest confusions a run shows."""

WIDE = 12
"""A confusion matrix of more classes has a row of its own."""

TOTAL_PICTURES = 96
"""How many mistakes a page shows; runs share them."""


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    groups = groups_of(runs)
    several = len(runs) > 1
    data = [player_of(run, ROOM // len(runs)) for run in runs]
    most = max(4, min(PICTURES, TOTAL_PICTURES // len(runs)))
    shown = next((number for number, run in enumerate(runs) if run.recipe.learns), 0)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta name="color-scheme" content="light dark">{MARK}',
        f"<title>{html.escape(_title(runs))}</title><style>{_asset('page.css')}</style></head><body>",
        f"<header><h1>{html.escape(_title(runs))}</h1><p>{html.escape(_subtitle(runs))}</p></header><main>",
        _side_by_side(groups) if several else "",
        _chooser(runs, groups, shown) if several else "",
        *(_run(run, number, several=several, most=most) for number, run in enumerate(runs)),
        "<noscript><p>The wiring needs a script; without one, see the drawings in the folder figures.</p></noscript>",
        "</main><div id=tip hidden></div>",
        f'<script type="application/json" id=runs>{_json(data)}</script>',
        f"<script>{_asset('page.js')}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _asset(name: str) -> str:
    return (files("maskconnect.report") / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _title(runs: Sequence[Run]) -> str:
    networks, sets = {run.network for run in runs}, {data_name(run.recipe) for run in runs}
    what = f"{runs[0].network}" if len(networks) == 1 else f"{len(networks)} networks"
    where = f" on {data_name(runs[0].recipe)}" if len(sets) == 1 else ""
    return f"{runs[0].wiring}: {what}{where}" if len(runs) == 1 else f"{len(runs)} runs of {what}{where}"


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return "Made by maskconnect report. Accuracies are those of the last epoch unless a column says otherwise."
    return f"{runs[0].recipe.about or runs[0].recipe.name}, seed {runs[0].recipe.seed}"


def _side_by_side(groups: Sequence[Group]) -> str:
    plots = [charts.fan_in(groups), charts.accuracy_of_all(groups), charts.branching(groups), charts.readers(groups)]
    shown = "".join(figure(chart) for chart in plots if chart is not None and not chart.empty)
    spread = any(len(group.ended) > 1 for group in groups)
    data = html.escape(data_names(run.recipe for group in groups for run in group.runs))
    note = f"<p class=note>Accuracies are of {data}.{' ± is the standard deviation over seeds.' * spread}</p>"
    return f"<section><h2>Side by side</h2>{comparison(groups)}{note}<div class=charts>{shown}</div></section>"


def _chooser(runs: Sequence[Run], groups: Sequence[Group], shown: int) -> str:
    label = {id(run): group.label for group in groups for run in group.runs}
    often = Counter(run.name for run in runs)
    folders = [run.name if often[run.name] == 1 else str(run.path) for run in runs]
    names = [f"{label[id(run)]}, seed {run.recipe.seed} — {path}" for run, path in zip(runs, folders, strict=True)]
    options = "".join(
        f"<option value={number}{' selected' * (number == shown)}>{html.escape(name)}</option>"
        for number, name in enumerate(names)
    )
    return f"<nav class=chooser><label for=choose>One run</label> <select id=choose>{options}</select></nav>"


def _run(run: Run, number: int, *, several: bool, most: int) -> str:
    """All about one run."""
    shown = "".join(figure(chart) for chart in charts.curves(run))
    if not several:
        alone = groups_of([run])
        own = [charts.branching(alone), charts.readers(alone)]
        shown += "".join(figure(chart) for chart in own if chart is not None)
    cards = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts(run)
    )
    title = f"<h2>{html.escape(f'{run.wiring}, seed {run.recipe.seed}')}</h2>" if several else ""
    training = f"<h3>Training</h3><div class=charts>{shown}</div>" if shown else ""
    return (
        f"<section class=run data-run={number}>{title}<dl class=facts>{cards}</dl>"
        f"<h3>Wiring</h3>{_player(run, number)}{training}{_mistakes(run, most)}{_origin(run)}</section>"
    )


def _player(run: Run, number: int) -> str:
    """What the script fills."""
    spec = run.recipe.model.shape
    plain = html.escape(f"{WIRINGS[spec.PLAIN]}, {spec.plain_words}")
    beside = (
        f"<figure class=view><figcaption>{plain}</figcaption><svg class=usual></svg></figure>"
        if run.wires.sources != usual_wires(spec).sources
        else ""
    )
    controls = (
        '<div class=controls><button type=button class=play aria-label="Play training">▶</button>'
        f"<div class=track><div class=phases></div><input type=range min=0 max={max(1, run.done)} value={run.done} "
        'step=1 aria-label="Epoch"></div><output></output></div>'
        if run.recipe.learns
        else ""
    )
    legend = (
        "A line is a connection: the stronger, the larger its real mask. Dashed blocks cannot reach the output and are "
        "pruned. Point at a block for its sources; click it for all that feeds it and all that it feeds; or walk by "
        "the arrow keys, Enter and Escape."
    )
    return (
        f"<div class=player data-player={number}>{controls}<p class=count role=status></p><div class=views>"
        f"<figure class=view><figcaption>{html.escape(run.wiring)}</figcaption><svg class=wiring></svg></figure>"
        f"{beside}<aside class=panel aria-live=polite></aside></div><p class=note>{legend}</p></div>"
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
        f"<li><span>{html.escape(name)}</span><i style='--share:{accuracy:.1f}%'></i><b>{accuracy:.1f}</b></li>"
        for accuracy, name in ranked[:CLASSES]
    )
    rest = f", the {CLASSES} worst of {len(ranked)}" if len(ranked) > CLASSES else ""
    worst = table(
        ("true", "predicted", "images"),
        [(names[t], names[p], str(count)) for t, p, count in confusion.worst(CONFUSIONS)],
        words=2,
    )
    shown = pictures(run.tested, names, most)
    wrong = f"<h4>Most surely wrong</h4>{shown}" if shown else ""
    return (
        f"<h3>Predictions of {len(run.tested.label_N):,} test images</h3><div class=mistakes>"
        f"<div{' class=big' * (len(names) > WIDE)}><h4>Confusion</h4>{matrix(confusion)}</div>"
        f"<div><h4>Accuracy by class, %{rest}</h4><ul class=bars>{bars}</ul></div>"
        f"<div><h4>Commonest confusions</h4>{worst}</div></div>{wrong}"
    )


def _origin(run: Run) -> str:
    """Where the run comes from: commands, recipe, environment."""
    typed = "".join(
        f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(text)}</code></dd>" for name, text in commands(run)
    )
    known = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in environment(run))
    return (
        f"<h3>Make it again</h3><dl class=origin>{typed}</dl>"
        f"<details><summary>Recipe</summary><pre>{html.escape(run.written)}</pre></details>"
        f"<details><summary>Environment</summary><dl class=origin>{known}</dl></details>"
    )
