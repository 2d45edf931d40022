"""Write the tables and figures of docs/evidence.md anew, by the commands that stand above them.

    .venv/bin/python tools/evidence.py

A command is an indented line, `maskconnect compare` or the `--show` of a benchmark; it runs in docs/evidence, and the
next table below it becomes what it prints. A test has the page fail if its tables are not what the files say.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
from pathlib import Path

from maskconnect.cli.main import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evidence.md"
COMMAND = re.compile(
    r"^    (maskconnect compare .*|python \.\./\.\./benchmarks/\w+\.py(?: \w+)? --show .*)\n\n((?:\|.*\n)+)",
    flags=re.MULTILINE,
)


def refreshed(text: str, folder: Path, *, figures: bool) -> str:
    """The page, every table of it made by the command above it; figures are drawn only if asked for."""

    def run(match: re.Match[str]) -> str:
        words = [path for word in shlex.split(match[1]) for path in _expanded(word, folder)]
        if "--figure" in words and not figures:
            place = words.index("--figure")
            del words[place : place + 2]
        return match[0][: match.start(2) - match.start()] + _table(words)

    with contextlib.chdir(folder):
        return COMMAND.sub(run, text)


def _expanded(word: str, folder: Path) -> list[str]:
    """What a shell makes of a word."""
    found = sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else []
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


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(refreshed(page, PAGE.parent / "evidence", figures=True))
    for drawn in (PAGE.parent / "images").glob("evidence-*.png"):
        drawn.unlink()  # the page shows the SVG
    print(f"{len(COMMAND.findall(page))} tables of {os.path.relpath(PAGE)} written anew")
