"""The command-line reference for the docs site has the help of every command."""

import subprocess
import sys
from pathlib import Path

import cli_reference
import pytest

COMMANDS = {
    "maskconnect",
    *(f"maskconnect {name}" for name in ("demo", "train", "sweep", "reproduce", "evaluate", "compare", "report")),
    *(f"maskconnect {name}" for name in ("prune", "predict", "export", "recipes", "data", "bench")),
    *(f"maskconnect recipes {name}" for name in ("show", "check")),
    *(f"maskconnect data {name}" for name in ("list", "check", "fetch", "build-mini")),
}


def test_every_command_has_a_section():
    titles = [line.removeprefix("## ") for line in cli_reference.markdown().splitlines() if line.startswith("## ")]
    assert set(titles) == COMMANDS
    assert len(titles) == len(COMMANDS)


@pytest.mark.parametrize("parser", list(cli_reference.parsers()), ids=lambda parser: parser.prog)
def test_every_help_has_a_sentence_and_examples_and_fits_the_page(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(cli_reference.WIDTH + 2))
    text = parser.format_help()
    assert f"```text\n{text.rstrip()}\n```" in cli_reference.markdown()
    assert parser.description.endswith(".")
    assert "\nexamples:\n  maskconnect" in text
    assert max(map(len, text.splitlines())) <= cli_reference.WIDTH


def test_the_tool_prints_the_page():
    tool = Path(cli_reference.__file__)
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    assert done.stdout == cli_reference.markdown()
