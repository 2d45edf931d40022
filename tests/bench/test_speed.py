"""The fast paths are faster than the readable ones; by how much, the benchmarks say."""

import pytest
import torch

from maskconnect.bench.cases import CASES
from maskconnect.bench.steps import step_of
from maskconnect.ship.measure import interleaved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "layout", "least"),
    [("resnext29-8-8", 8, torch.contiguous_format, 0.75), ("resnet38", 16, torch.channels_last, 1.0)],
)
def test_a_fast_step_takes_less_time_than_a_readable_one(name, batch, layout, least):
    steps = {variant: step_of(CASES[name], variant, batch, layout) for variant in ("learning", "reference")}
    times = interleaved(steps, 100, 20.0, least=5)
    assert times["learning"].over(times["reference"]).rounds < least
