import os

import pytest
import torch

from maskconnect.cli.main import main

torch.set_num_threads(1)  # the networks of the tests are so small that threads only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def type_in(tmp_path, monkeypatch, capfd):
    """Type a command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def type_in(*words):
        code = main([str(word) for word in words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return type_in
