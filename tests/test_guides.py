"""The code in the guides runs, their numbers are those of the results, and the API page is complete."""

import re

import evidence
import guides
import pytest
import torch

import maskconnect as mc

WITH_NUMBERS = [guides.DOCS / "index.md", guides.DOCS / "guides" / "discover.md"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", guides.PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_guide_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guides.run(block for block in guides.blocks_of(page) if block.runs and not block.needs_libraries)


def test_few_blocks_do_not_run():
    blocks = [block for page in guides.PAGES for block in guides.blocks_of(page)]
    assert len(blocks) > 20
    assert sum(not block.runs for block in blocks) == 3


def test_a_wrong_comment_is_found():
    with pytest.raises(AssertionError, match="4"):
        guides.run([guides.Block("print(1 + 2)  # 4", "")])


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: ([\w.]+)$", (guides.DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert {name.rpartition(".")[2] for name in listed} >= set(mc.__all__)


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_NUMBERS, ids=lambda page: page.stem)
def test_differences_in_a_guide_are_those_of_two_rows(page):
    text = page.read_text()
    known = evidence.differences()
    assert evidence.unsupported(text, known) == []
    wrong = re.sub(r"\(\+\d\.\d\d to", "(+9.99 to", text, count=1)
    assert evidence.unsupported(wrong, known) != []
