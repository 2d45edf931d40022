"""Rewrite the tables and figures of PAGES with the commands above them.

    .venv/bin/python tools/evidence.py

A command is an indented line: `maskconnect compare`, or a benchmark with `--show`. It runs in research/evidence, and
its output replaces the next table below it. Prose is not rewritten: differences with an interval that match no two rows
are listed. Tests fail if the tables or the prose of a page do not match the files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

from maskconnect.cli.main import main
from maskconnect.experiments.compare import sides_of
from maskconnect.training.statistics import difference_by_seed

ROOT = Path(__file__).resolve().parent.parent
RESEARCH = ROOT / "research"
KEPT = RESEARCH / "evidence"
PAGES = tuple(RESEARCH / f"{name}.md" for name in ("evidence", "join", "attempts", "when", "discovery"))
PROSE = (
    *(RESEARCH / f"{name}.md" for name in ("README", "evidence", "join", "when", "discovery")),
    ROOT / "docs" / "method.md",
    ROOT / "docs" / "reproduction.md",
    ROOT / "docs" / "choosing.md",
    ROOT / "docs" / "index.md",
    ROOT / "README.md",
)
"""Pages whose text quotes the evidence."""
COMMAND = re.compile(
    r"^    (maskconnect compare .*|python \.\./\.\./benchmarks/\w+\.py(?: [\w/-]+)? --show .*)\n\n((?:\|.*\n)+)",
    flags=re.MULTILINE,
)

DIFFERENCE = re.compile(r"([+-]?\d+\.\d\d)[^\d|\n]{1,40}?([+-]?\d+\.\d\d) to ([+-]?\d+\.\d\d)")
"""A difference and its interval, in words or in a cell of a table."""


def refreshed(text: str, *, figures: bool) -> str:
    """Return the page with every table replaced by the output of the command above it; draw figures only if asked."""

    def run(match: re.Match[str]) -> str:
        words = [path for word in shlex.split(match[1]) for path in _expanded(word)]
        if "--figure" in words and not figures:
            place = words.index("--figure")
            del words[place : place + 2]
        return match[0][: match.start(2) - match.start()] + _table(words)

    with contextlib.chdir(KEPT):
        return COMMAND.sub(run, text)


def _expanded(word: str) -> list[str]:
    """Expand a word as a shell does."""
    found = sorted(str(path.relative_to(KEPT)) for path in KEPT.glob(word)) if "*" in word else []
    return found or [word]


def _table(words: list[str]) -> str:
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said):
        if words[0] == "maskconnect":
            code = main([*words[1:], "--markdown"])
        else:
            runpy.run_path(words[1])["main"](words[2:])
    if code:
        raise SystemExit(f"{' '.join(words)} failed with exit code {code}.")
    return "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("|"))


def unsupported(text: str, known: set[tuple[float, ...]]) -> list[str]:
    """Return the differences in a text that no two rows have; the output of commands is left out."""
    quoted = DIFFERENCE.finditer(re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    return [match[0] for match in quoted if _either_way(*map(float, match.groups())) not in known]


def differences() -> set[tuple[float, ...]]:
    """Return the difference of any two rows as texts quote it: in hundredths, with interval, better row first."""
    tables = "".join(match[2] for page in PAGES for match in COMMAND.finditer(page.read_text()))
    for page in (RESEARCH / "log.md", RESEARCH / "budget.md"):  # no command here rewrites their tables
        tables += "".join(re.findall(r"^\|.*\n", page.read_text(), flags=re.MULTILINE))
    found = {_either_way(*map(float, match.groups())) for match in DIFFERENCE.finditer(tables)}
    for rows in _rows():
        for ours, theirs in combinations(rows, 2):
            difference = difference_by_seed(ours, theirs)
            if difference.interval is not None:
                found.add(_either_way(difference.mean, *difference.interval))
    return found


def _rows() -> Iterator[list[Mapping[int, float]]]:
    """Yield groups of rows that can be compared: the accuracy of each row by seed."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "discovery.py"))
    kinds = ("quick-cifar100*.json", "quick-cifar10[-_]*.json")
    places: list[tuple[list[Path], range | None]] = [(sorted(KEPT.glob(kind)), None) for kind in kinds]
    places += [(sorted((KEPT / "join").glob(kind)), None) for kind in kinds]
    places.append(([*places[0][0], *places[2][0]], range(13, 26)))  # the runs by which a join was chosen
    places.append((sorted((KEPT / "join/overfit").glob("*.json")), None))
    for part in ("test", "validation"):
        for files, seeds in places:
            yield [side.accuracy for side in sides_of(files, part, seeds)]
        for kind in ("unequal_branches-*.json", "discover-*.json"):
            for path in sorted((KEPT / "benchmarks").glob(kind)):
                found = json.loads(path.read_text())
                yield [benchmark["by_seed"](found, row, part) for row in found]
        sampled = json.loads((KEPT / "benchmarks" / "images.json").read_text())
        for recipe in {row.rpartition(",")[0] for row in sampled}:
            yield [benchmark["by_seed"](sampled, row, part) for row in sampled if row.startswith(f"{recipe},")]


def _either_way(mean: float, low: float, high: float) -> tuple[float, ...]:
    """Return the same numbers for A over B as for B over A."""
    return tuple(round(x, 2) + 0.0 for x in ((mean, low, high) if mean >= 0 else (-mean, -high, -low)))


if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))  # benchmarks import each other
    for page in PAGES:
        text = page.read_text()
        page.write_text(refreshed(text, figures=True))
        print(f"{len(COMMAND.findall(text))} tables of {os.path.relpath(page)} rewritten")
    for drawn in (RESEARCH / "images").glob("evidence-*.png"):
        drawn.unlink()  # the pages show the SVG
    known = differences()
    for page in PROSE:
        for words in unsupported(page.read_text(), known):
            print(f"{os.path.relpath(page)}: no two rows differ by {words}")
