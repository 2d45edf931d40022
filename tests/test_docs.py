"""README and docs tell the truth."""

import importlib
import re
import shlex
from pathlib import Path

import evidence
import guides
import pytest

import maskconnect as mc
from maskconnect.cli.main import command_parser
from maskconnect.experiments.kept import Kept
from maskconnect.recipes import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").glob("*.md"))]


def test_the_code_in_the_readme_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec("\n".join(block.code for block in guides.blocks_of(guides.README) if not block.needs_libraries), {})
    wiring, *code = capsys.readouterr().out.splitlines()
    assert wiring.startswith("[[], [0], [0, 1]")
    assert "def forward(self, x):" in "".join(code)
    assert (tmp_path / "wiring.svg").is_file()


def test_the_readme_is_short_and_begins_with_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 160
    assert {"make run", "make test"} <= {" ".join(line.split()[:2]) for line in lines[:25]}


def commands_in(text: str) -> list[list[str]]:
    """The arguments of every `maskconnect` command in an indented block or a comment of a recipe."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^(?:    |# )(?:torchrun .*-m )?maskconnect ((?!compare quick-)[a-z].*)$", joined, re.MULTILINE)
    return [shlex.split(re.sub(r" {2,}\(.*\)$", "", words), comments=True) for words in found]


WITH_COMMANDS = [
    *(page for page in PAGES if page.parent.name != "research"),
    *(ROOT / name for name in ("CONTRIBUTING.md", "research/README.md")),
    *sorted((ROOT / "src/maskconnect/recipes").rglob("*.toml")),
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_have_the_options_and_the_recipes_that_they_name(page):
    for words in commands_in(page.read_text()):
        args = command_parser().parse_args(words)
        name = getattr(args, "recipe", None)
        if isinstance(name, str) and name.partition("/")[0] in ("paper", "quick", "discover", "strong"):
            load(name, getattr(args, "settings", None) or [])


def test_commands_are_found():
    assert sum(len(commands_in(page.read_text())) for page in WITH_COMMANDS) > 60
    with pytest.raises(mc.ConfigError, match="unknown option: --fast"):
        command_parser().parse_args(*commands_in("    maskconnect train quick/digits --fast  # soon"))


def test_the_architecture_names_every_folder_and_only_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    source = ROOT / "src" / "maskconnect"
    for folder in {path.parent for path in source.rglob("*") if path.suffix in (".py", ".toml")} - {source}:
        assert f"`{folder.relative_to(source)}`" in text, folder
    files = {path.as_posix() for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")}
    named = re.findall(r"[`\s]([\w/]+\.py)\b", text)
    assert len(named) > 20
    for name in named:
        assert any(path.endswith(f"/{name}") for path in files), name


def quotes(text: str) -> list[tuple[str, list[str]]]:
    """The lines that a page quotes from a file, without their indentation."""
    found = re.findall(r'^```python title="([^"]+)"\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE)
    return [(name, [line.strip() for line in block.splitlines() if line.strip()]) for name, block in found]


def test_the_code_that_the_method_quotes_is_in_the_source():
    found = quotes((ROOT / "docs/method.md").read_text())
    assert len(found) > 7
    for name, lines in found:
        source = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        assert [line for line in lines if line not in source] == [], name


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"
    for name in re.findall(r"`(?:paper/)?(test_\w+\.py)", text):
        assert list((ROOT / "tests").rglob(name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_are_lists_on_the_site_too(page):
    """Python-Markdown, unlike a repository browser, needs an empty line between a text and its list."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n|^#.*\n", text, flags=re.MULTILINE):
        assert re.search(r"^[^-\d\s].*\n(?:-|\d+\.) ", part) is None, part
        assert re.search(r"^\|.*\n[^|\s]", part, re.MULTILINE) is None, part  # a line below a table joins it


def test_pages_that_the_code_names_exist():
    files = [path for top in ("src", "examples", "benchmarks", "tools") for path in (ROOT / top).rglob("*.py")]
    named = [(path, page) for path in files for page in re.findall(r"\b(?:docs|research)/\w+\.md", path.read_text())]
    assert [(path.name, page) for path, page in named if not (ROOT / page).exists()] == []
    assert len(named) > 3


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
    for page in evidence.PROSE:
        text = page.read_text()
        assert evidence.unsupported(text, known) == []
        last = [match for match in evidence.DIFFERENCE.finditer(text) if not text[: match.start()].endswith("    ")][-1]
        wrong = f"{text[: last.start(3)]}+99.99{text[last.end(3) :]}"
        assert evidence.unsupported(wrong, known) != [], page.name


def test_the_evidence_can_be_added_to_as_it_says():
    found = Kept(evidence.KEPT)
    assert found.get(load("quick/cifar100-strong", ["seed=0"]))
    assert found.get(load("quick/cifar100-resnext-strong", ["seed=0"]))


def test_every_name_in_the_method_exists():
    names = re.findall(r"`(\w+)\.(\w+)", (ROOT / "docs" / "method.md").read_text())
    modules: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "maskconnect").glob("*/*.py"):
        modules.setdefault(path.stem, []).append(f"maskconnect.{path.parent.name}.{path.stem}")
    found = [(module, name) for module, name in names if module in modules]
    assert len(found) > 30
    for module, name in found:
        assert any(hasattr(importlib.import_module(full), name) for full in modules[module]), f"{module}.{name}"


def test_the_version_is_the_same_everywhere():
    assert f"version: {mc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {mc.__version__}" in (ROOT / "CHANGELOG.md").read_text()
