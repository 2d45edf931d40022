"""Runs whose networks the tests ship; whoever changes their files works on a copy."""

import pytest
import runs

from maskconnect.cli.main import main


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """A finished run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("learned")
    runs.run(runs.tiny(folder, *SHORT), folder / "run")
    return folder / "run"


SHORT = ("phase.learn.epochs=1", "phase.freeze.epochs=1")


@pytest.fixture
def type_in(tmp_path, monkeypatch, capfd):
    """Type a command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def type_in(*words):
        code = main([str(word) for word in words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return type_in
