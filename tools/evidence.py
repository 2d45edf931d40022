"""Rewrite the tables and figures of PAGES by the commands above them.

    .venv/bin/python tools/evidence.py

A command is an indented line, `maskconnect compare` or the `--show` of a benchmark; it runs in docs/evidence, and the
next table below it becomes what it prints. Words are not written anew: differences that they tell with an interval, and
that no two rows have (any more), are listed. Tests have the pages fail if their tables or words are not what the files
say.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

from maskconnect.cli.main import main
from maskconnect.experiments.compare import sides_of
from maskconnect.training.statistics import difference_by_seed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
KEPT = DOCS / "evidence"
PAGES = (DOCS / "evidence.md", DOCS / "join.md", DOCS / "attempts.md", DOCS / "when.md", DOCS / "discovery.md")
TELL = (*(DOCS / f"{name}.md" for name in ("evidence", "join", "when", "discovery", "claims")), ROOT / "README.md")
"""Pages that tell in words what the evidence is now."""
COMMAND = re.compile(
    r"^    (maskconnect compare .*|python \.\./\.\./benchmarks/\w+\.py(?: [\w/-]+)? --show .*)\n\n((?:\|.*\n)+)",
    flags=re.MULTILINE,
)

TOLD = re.compile(r"([+-]?\d+\.\d\d)[^\d|\n]{1,40}?([+-]?\d+\.\d\d) to ([+-]?\d+\.\d\d)")
"""A difference and its interval, in words or in a cell of a table."""


def refreshed(text: str, *, figures: bool) -> str:
    """The page, every table of it made by the command above it; figures are drawn only if asked for."""

    def run(match: re.Match[str]) -> str:
        words = [path for word in shlex.split(match[1]) for path in _expanded(word)]
        if "--figure" in words and not figures:
            place = words.index("--figure")
            del words[place : place + 2]
        return match[0][: match.start(2) - match.start()] + _table(words)

    with contextlib.chdir(KEPT):
        return COMMAND.sub(run, text)


def _expanded(word: str) -> list[str]:
    """What a shell makes of a word."""
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
        raise SystemExit(f"{' '.join(words)} ended with {code}.")
    return "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("|"))


def unfounded(text: str, known: set[tuple[float, ...]]) -> list[str]:
    """What a text tells with an interval, and is not the difference of any two rows; what a command printed aside."""
    told = TOLD.finditer(re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    return [match[0] for match in told if _either_way(*map(float, match.groups())) not in known]


def differences() -> set[tuple[float, ...]]:
    """The difference of any two rows, as it is told: in hundredths, with its interval, the better row first."""
    tables = "".join(match[2] for page in PAGES for match in COMMAND.finditer(page.read_text()))
    tables += "".join(re.findall(r"^\|.*\n", (DOCS / "log.md").read_text(), flags=re.MULTILINE))
    found = {_either_way(*map(float, match.groups())) for match in TOLD.finditer(tables)}
    for rows in _rows():
        for ours, theirs in combinations(rows, 2):
            difference = difference_by_seed(ours, theirs)
            if difference.interval is not None:
                found.add(_either_way(difference.mean, *difference.interval))
    return found


def _rows() -> Iterator[list[Mapping[int, float]]]:
    """All rows that can be compared: of each, the accuracy by seed."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "discovery.py"))
    kinds = ("quick-cifar100*.json", "quick-cifar10[-_]*.json")
    places: list[tuple[list[Path], range | None]] = [(sorted(KEPT.glob(kind)), None) for kind in kinds]
    places += [(sorted((KEPT / "join").glob(kind)), None) for kind in kinds]
    places.append(([*places[0][0], *places[2][0]], range(13, 26)))  # what the choice of a join was made by
    places.append((sorted((KEPT / "join/overfit").glob("*.json")), None))
    for part in ("test", "validation"):
        for files, seeds in places:
            yield [side.accuracy for side in sides_of(files, part, seeds)]
        for kind in ("unequal_branches-*.json", "discover-*.json"):
            for path in sorted((KEPT / "benchmarks").glob(kind)):
                found = json.loads(path.read_text())
                yield [benchmark["by_seed"](found, row, part) for row in found]


def _either_way(mean: float, low: float, high: float) -> tuple[float, ...]:
    """The same for A over B as for B under A."""
    return tuple(round(x, 2) + 0.0 for x in ((mean, low, high) if mean >= 0 else (-mean, -high, -low)))


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        page.write_text(refreshed(text, figures=True))
        print(f"{len(COMMAND.findall(text))} tables of {os.path.relpath(page)} written anew")
    for drawn in (DOCS / "images").glob("evidence-*.png"):
        drawn.unlink()  # the pages show the SVG
    known = differences()
    for page in TELL:
        for words in unfounded(page.read_text(), known):
            print(f"{os.path.relpath(page)}: no two rows differ by {words}")
