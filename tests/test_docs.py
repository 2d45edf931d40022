"""README and docs tell the truth."""

import importlib
import re
from pathlib import Path

import evidence
import pytest

import maskconnect as mc
from maskconnect.experiments.kept import Kept
from maskconnect.recipes import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_code_in_the_readme_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)), {})
    wiring, count = capsys.readouterr().out.splitlines()
    assert wiring.startswith("[[], [0], [0, 1]")
    assert f"# {count}\n" in text


def test_the_tour_names_every_file():
    tree = (ROOT / "docs/tour.md").read_text().split("## Every file")[1]
    for path in (ROOT / "src" / "maskconnect").rglob("*.py"):
        if path.stem != "__init__":
            assert f" {path.name} " in tree, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`(?:paper/)?(test_\w+\.py)", text):
        assert list((ROOT / "tests").rglob(name)), name


@pytest.mark.docs
@pytest.mark.parametrize("page", evidence.PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_evidence_are_what_its_files_say(page):
    text = page.read_text()
    commands = re.findall(r"^    (?:maskconnect compare|python .* --show) ", text, re.MULTILINE)
    assert len(evidence.COMMAND.findall(text)) == len(commands) > 2
    assert evidence.refreshed(text, figures=False) == text


@pytest.mark.docs
def test_differences_in_words_are_those_of_two_rows():
    known = evidence.differences()
    for page in evidence.TELL:
        text = page.read_text()
        assert evidence.unfounded(text, known) == []
        last = [match for match in evidence.TOLD.finditer(text) if not text[: match.start()].endswith("    ")][-1]
        wrong = f"{text[: last.start(3)]}+99.99{text[last.end(3) :]}"
        assert evidence.unfounded(wrong, known) != [], page.name


def test_the_evidence_can_be_added_to_as_it_says():
    found = Kept(evidence.KEPT)
    assert found.get(load("quick/cifar100-strong", ["seed=0"]))
    assert found.get(load("quick/cifar100-resnext-strong", ["seed=0"]))


def test_every_name_in_the_paper_map_exists():
    names = re.findall(r"`(\w+)\.(\w+)", (ROOT / "docs" / "paper_map.md").read_text())
    modules: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "maskconnect").glob("*/*.py"):
        modules.setdefault(path.stem, []).append(f"maskconnect.{path.parent.name}.{path.stem}")
    found = [(module, name) for module, name in names if module in modules]
    assert len(found) > 10
    for module, name in found:
        assert any(hasattr(importlib.import_module(full), name) for full in modules[module]), f"{module}.{name}"


def test_the_version_is_the_same_everywhere():
    assert f"version: {mc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {mc.__version__}" in (ROOT / "CHANGELOG.md").read_text()
