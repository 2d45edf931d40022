"""What tests of many runs share."""

import pytest
import runs


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe of the tests as a file in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runs.tiny(tmp_path)
    return "tiny.toml"
