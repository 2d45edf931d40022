"""Tables of a page: what came of runs, side by side and with what the paper says; a run in full."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import Any

from maskconnect.recipes.naming import data_name
from maskconnect.recipes.schema import Paper
from maskconnect.report.groups import Group
from maskconnect.report.runs import Run
from maskconnect.training.progress import duration
from maskconnect.training.statistics import statistic


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """An HTML table of escaped text, whose first `words` columns are words and the others numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = ["" if number < words else " class=n" for number in range(len(cells))]
        return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<div class=wide><table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def comparison(groups: Sequence[Group]) -> str:
    """All groups side by side; columns that would be empty are left out."""
    columns = {
        "wiring": [group.label for group in groups],
        "seeds": [_ended(group) for group in groups],
        "test accuracy, %": [_mean(group, lambda s: s["test"]["top1"]) for group in groups],
        "top-5, %": [_mean(group, lambda s: s["test"]["top5"]) for group in groups],
        "best epoch, % (chosen on test)": [
            _mean(group, lambda s: s["best"]["test"]["top1"] if s["best"]["chosen_on"] == "test" else None)
            for group in groups
        ],
        "best epoch, % (chosen on validation)": [
            _mean(group, lambda s: s["best"]["test"]["top1"] if s["best"]["chosen_on"] != "test" else None)
            for group in groups
        ],
        "paper, %": [paper_accuracy(group.paper) for group in groups],
        "parameters": [_mean(group, lambda s: s["parameters"]["weights"], digits=0) for group in groups],
        "after pruning": [_mean(group, lambda s: s["parameters"]["pruned"], digits=0) for group in groups],
        "paper, after pruning": [_millions(group.paper) for group in groups],
        "time a run": [_time(group) for group in groups],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return table(list(kept), list(zip(*kept.values(), strict=True)))


def _ended(group: Group) -> str:
    running = sum(run.summary is None for run in group.runs)
    again = len(group.runs) - running - len(group.ended)
    more = [f"{running} not ended"] * bool(running) + [f"{again} of the same seed, left out"] * bool(again)
    return f"{len(group.ended)}" + (f" (+ {', '.join(more)})" if more else "")


def _mean(group: Group, value: Any, digits: int = 2) -> str:
    found = [value(run.summary) for run in group.ended]
    known = [float(number) for number in found if number is not None]
    if not known:
        return ""
    s = statistic(known)
    spread = "" if s.deviation is None or not (digits or s.deviation) else f" ± {s.deviation:,.{digits}f}"
    return f"{s.mean:,.{digits}f}{spread}"


def _time(group: Group) -> str:
    found = [run.summary["seconds"] for run in group.ended if run.summary is not None]
    return duration(statistic(found).mean) if found else ""


def paper_accuracy(paper: Paper | None) -> str:
    """What the paper got: the best of its runs, with their mean where it says one."""
    if paper is None or paper.accuracy is None:
        return ""
    mean = "" if paper.mean is None else f" (mean {paper.mean:.2f}"
    spread = "" if paper.mean is None or paper.std is None else f" ± {paper.std:.2f}"
    return f"{paper.accuracy:.2f}{mean}{spread}{')' if mean else ''}"


def _millions(paper: Paper | None) -> str:
    return "" if paper is None or paper.pruned is None else f"{paper.pruned:g} M"


def facts(run: Run) -> list[tuple[str, str]]:
    """A run in a few numbers, each with what it is."""
    if run.summary is None:
        known = [e.test_top1 for e in run.epochs if e.test_top1 is not None]
        so_far = f"{known[-1]:.2f} %" if known else "not yet tested"
        epochs = f"epoch {run.done} of {run.recipe.epochs}"
        return [("not ended", epochs), ("data", data_name(run.recipe)), ("test accuracy so far", so_far)]
    summary, parameters = run.summary, run.summary["parameters"]
    best = summary["best"]
    found = [("data", data_name(run.recipe)), ("test accuracy, last epoch", f"{summary['test']['top1']:.2f} %")]
    found.append((f"best epoch, {best['epoch']} (chosen on {best['chosen_on']})", f"{best['test']['top1']:.2f} %"))
    if run.recipe.paper is not None and run.recipe.paper.accuracy is not None:
        found.append((f"the paper, {run.recipe.paper.where}", f"{paper_accuracy(run.recipe.paper)} %"))
    if summary["freeze"]:
        drawn, frozen = (summary["freeze"][key]["top1"] for key in ("drawn", "frozen"))
        found.append((f"at the freeze: drawn masks → {run.recipe.frozen_to}", f"{drawn:.2f} → {frozen:.2f} %"))
    found.append(("parameters", f"{parameters['weights']:,}"))
    found.append(("after pruning", f"{parameters['pruned']:,}"))
    if parameters["pruned_one_step"] != parameters["pruned"]:
        found.append(("after pruning, by the paper's one-step rule", f"{parameters['pruned_one_step']:,}"))
    found.append(("time", duration(summary["seconds"])))
    return found


def commands(run: Run) -> list[tuple[str, str]]:
    """What was typed, and what makes the run again."""
    found = []
    typed = run.starts[0].get("arguments") if run.starts else None
    if isinstance(typed, list):
        found.append(("typed", shlex.join(["maskconnect", *map(str, typed)])))
    place = run.path.resolve()
    again = ["maskconnect", "train", str(place / "recipe.toml"), "--out", f"{place}-again"]
    found.append(("the same run again", shlex.join([*again, *_options(run)])))
    return found


def _options(run: Run) -> list[str]:
    """The options of a run that decide its bits, where they were not the usual ones."""
    kept = run.starts[0].get("options") if run.starts else None
    options = kept if isinstance(kept, dict) else {}
    words = []
    for name in ("data", "device", "precision", "threads"):
        value = options.get(name)
        if value not in (None, "auto", "fp32"):
            words += [f"--{name}", str(value)]
    for name in ("channels_last", "compile", "lean", "deterministic", "skip_nonfinite"):
        if options.get(name) is True:
            words.append(f"--{name.replace('_', '-')}")
    return words


def environment(run: Run) -> list[tuple[str, str]]:
    """On what a run ran: of its last start, as text."""
    if not run.starts:
        return []
    start = run.starts[-1]
    packages = start.get("packages")
    found = [
        (key, str(start[key]))
        for key in ("time", "python", "platform", "commit", "device", "cpu", "cuda", "threads")
        if start.get(key) is not None
    ]
    if isinstance(packages, dict):
        found.append(("packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    found.append(("starts", str(len(run.starts))))
    return found
