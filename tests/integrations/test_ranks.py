"""The Trainer of transformers on two processes, with a freeze in the middle."""

import pytest
import torch
from launch import torchrun
from several import HOWS, trainer
from small import Regression


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
def test_two_ranks_train_as_one_and_resume_bitwise(tmp_path):
    torchrun("trainer.py", tmp_path)
    for name, how in HOWS.items():
        one = trainer(tmp_path / "one" / name, how)
        one.train()
        two = torch.load(tmp_path / f"{name}.pt")
        assert two["stack.masks.frozen"]
        assert not torch.equal(two["stack.masks.real"], Regression().stack.masks.real)
        for key, value in one.model.state_dict().items():
            torch.testing.assert_close(two[key], value)
        drawings = [(place / name / "wiring.svg").read_text() for place in (tmp_path, tmp_path / "one")]
        assert drawings[0] == drawings[1]
