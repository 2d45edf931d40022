"""Runs whose networks the tests ship; whoever changes their files works on a copy."""

import pytest
import runs


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """A finished run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("learned")
    runs.run(runs.tiny(folder, *SHORT), folder / "run")
    return folder / "run"


SHORT = ("phase.learn.epochs=1", "phase.freeze.epochs=1")
