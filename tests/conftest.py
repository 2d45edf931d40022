import pytest
import torch

torch.set_num_threads(1)  # the networks of the tests are so small that threads only wait for each other


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
