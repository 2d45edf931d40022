"""Tables of the page: results of runs side by side and with those of the paper; the facts of one run."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import Any

from maskconnect.recipes.schema import Paper
from maskconnect.report.groups import Group
from maskconnect.report.history import Run
from maskconnect.report.mistakes import breakable
from maskconnect.report.runs import TrainedRun
from maskconnect.training.progress import duration
from maskconnect.training.statistics import statistic


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """An HTML table of escaped text, whose first `words` columns are words and the others numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        first = "".join(f"<{tag}>{breakable(cell)}</{tag}>" for cell in cells[:words])
        return first + "".join(f"<{tag} class=n>{html.escape(cell)}</{tag}>" for cell in cells[words:])

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<div class=wide><table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def comparison(groups: Sequence[Group]) -> str:
    """All groups side by side; columns that would be empty are left out."""
    columns = {
        "wiring": [group.label for group in groups],
        "seeds": [_ended(group) for group in groups],
        "test accuracy, %": [_mean(group, "test", "top1") for group in groups],
        "top-5, %": [_mean(group, "test", "top5") for group in groups],
        "best epoch, % (chosen on test)": [_best(group, "test") for group in groups],
        "best epoch, % (chosen on validation)": [_best(group, "validation") for group in groups],
        "paper, %": [paper_accuracy(group.paper) for group in groups],
        "parameters": [_mean(group, "parameters", "weights", digits=0) for group in groups],
        "after pruning": [_mean(group, "parameters", "pruned", digits=0) for group in groups],
        "paper, after pruning": [_millions(group.paper) for group in groups],
        "time per run": [_time(group) for group in groups],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return table(list(kept), list(zip(*kept.values(), strict=True)))


def _ended(group: Group) -> str:
    running = sum(run.summary is None for run in group.runs)
    again = len(group.runs) - running - len(group.ended)
    more = [f"{running} not ended"] * bool(running) + [f"{again} of the same seed, left out"] * bool(again)
    return f"{len(group.ended)}" + (f" (+ {', '.join(more)})" if more else "")


def _best(group: Group, chosen_on: str) -> str:
    """The accuracy of the best epoch, if these images chose it."""
    bests = [run.summary.get("best") for run in group.ended if run.summary is not None]
    return _mean(group, "best", "test", "top1") if any(b and b["chosen_on"] == chosen_on for b in bests) else ""


def _mean(group: Group, *keys: str, digits: int = 2) -> str:
    """The mean of a number of the summaries, with its standard deviation; empty if no summary has it."""
    known = [float(found) for run in group.ended if (found := _at(run.summary, keys)) is not None]
    if not known:
        return ""
    s = statistic(known)
    spread = "" if s.deviation is None or not (digits or s.deviation) else f" ± {s.deviation:,.{digits}f}"
    return f"{s.mean:,.{digits}f}{spread}"


def _at(found: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        found = None if found is None else found.get(key)
    return found


def _time(group: Group) -> str:
    found = [run.summary["seconds"] for run in group.ended if run.summary is not None]
    return duration(statistic(found).mean) if found else ""


def paper_accuracy(paper: Paper | None) -> str:
    """The result of the paper: its best run, and the mean where it is given."""
    if paper is None or paper.accuracy is None:
        return ""
    mean = "" if paper.mean is None else f" (mean {paper.mean:.2f}"
    spread = "" if paper.mean is None or paper.std is None else f" ± {paper.std:.2f}"
    return f"{paper.accuracy:.2f}{mean}{spread}{')' if mean else ''}"


def _millions(paper: Paper | None) -> str:
    return "" if paper is None or paper.pruned is None else f"{paper.pruned:g} M"


def facts(run: Run) -> list[tuple[str, str]]:
    """The main numbers of a run, each after its name."""
    data = [("data", run.data)] if run.data else []
    if run.summary is None:
        known = [e.test_top1 for e in run.epochs if e.test_top1 is not None]
        so_far = f"{known[-1]:.2f} %" if known else "not yet tested"
        of = f" of {run.planned}" if isinstance(run, TrainedRun) else ""
        return [("not ended", f"epoch {run.done}{of}"), *data, ("test accuracy so far", so_far)]
    summary, parameters, best = run.summary, run.summary["parameters"], run.summary["best"]
    found = data
    if run.test_accuracy is not None:
        found.append(("test accuracy, last epoch", f"{run.test_accuracy:.2f} %"))
    if best is not None:
        found.append((f"best epoch, {best['epoch']} (chosen on {best['chosen_on']})", f"{best['test']['top1']:.2f} %"))
    if isinstance(run, TrainedRun):
        found += _facts_of_recipe(run, summary)
    elif run.learns:
        frozen = "not frozen" if run.freeze is None else f"after epoch {run.freeze}"
        found += [("epochs", str(run.done)), ("wiring frozen", frozen)]
    found.append(("parameters", f"{parameters['weights']:,}"))
    found.append(("after pruning", f"{parameters['pruned']:,}"))
    if parameters.get("pruned_one_step", parameters["pruned"]) != parameters["pruned"]:
        found.append(("after pruning, by the paper's one-step rule", f"{parameters['pruned_one_step']:,}"))
    found.append(("time", duration(summary["seconds"])))
    return found


def _facts_of_recipe(run: TrainedRun, summary: dict[str, Any]) -> list[tuple[str, str]]:
    found, paper = [], run.recipe.paper
    if paper is not None and paper.accuracy is not None:
        found.append((f"the paper, {paper.where}", f"{paper_accuracy(paper)} %"))
    if summary["freeze"]:
        drawn, frozen = (summary["freeze"][key]["top1"] for key in ("drawn", "frozen"))
        found.append(
            (f"when frozen: {run.recipe.masks_in_training} → {run.recipe.frozen_to}", f"{drawn:.2f} → {frozen:.2f} %")
        )
    return found


def commands(run: TrainedRun) -> list[tuple[str, str]]:
    """The command that made the run, and the one that repeats it."""
    found = []
    typed = run.starts[0].get("arguments") if run.starts else None
    if isinstance(typed, list):
        found.append(("typed", shlex.join(["maskconnect", *map(str, typed)])))
    place = run.path.resolve()
    again = ["maskconnect", "train", str(place / "recipe.toml"), "--out", f"{place}-again"]
    found.append(("to repeat the run", shlex.join([*again, *_options(run)])))
    return found


def _options(run: TrainedRun) -> list[str]:
    """The options that affect the bits of a result, where they differ from the defaults."""
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
    """The machine and the versions of the last start, as text."""
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
