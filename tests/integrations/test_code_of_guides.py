"""Blocks of the guides that need timm, transformers or Lightning, after those of the same page that do not."""

import guides
import pytest

PAGES = [page for page in guides.PAGES if any(block.needs_libraries for block in guides.blocks_of(page))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_guide_runs_with_other_libraries(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guides.run(block for block in guides.blocks_of(page) if block.runs)
