"""The fast paths are faster than the readable ones, and learning steps take no longer than their bars allow."""

import pytest

from maskconnect.bench.cases import CASES
from maskconnect.bench.forms import Form
from maskconnect.bench.steps import step_of, time_steps
from maskconnect.ship.measure import interleaved
from maskconnect.training.options import keep_memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "layout", "least"),
    [("resnext29-8-8", 8, "channels first", 0.75), ("resnet38", 16, "channels last", 1.0)],
)
def test_a_fast_step_takes_less_time_than_a_readable_one(name, batch, layout, least):
    form = Form(layout=layout)
    steps = {variant: step_of(CASES[name], variant, batch, form) for variant in ("learning", "reference")}
    times = interleaved(steps, 100, 20.0, least=5)
    assert times["learning"].over(times["reference"]).rounds < least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet38", "resnet110", "resnext29-8-8", "transformer12"])
def test_a_learning_step_takes_no_longer_than_the_bar_allows(name):
    case = CASES[name]
    batch = case.batches[-1]
    keep_memory()
    measured = []
    for _ in range(5):  # on a busy machine, measurements of the same code differ by 15 %
        found = time_steps(case, batch, seconds=20.0, variants=("plain", "learning"))
        measured.append(found.times["learning"].over(found.times["plain"]).rounds)
        if measured[-1] < case.bar.time[batch]:
            return
    pytest.fail(f"a learning step took {measured} times as long as a plain one; the bar is {case.bar.time[batch]}")


@pytest.mark.parametrize("name", CASES)
def test_every_batch_size_has_a_bar_and_an_aim(name):
    case = CASES[name]
    assert set(case.bar.time) == set(case.aim.time) == set(case.batches)
    assert all(case.aim.time[batch] <= case.bar.time[batch] for batch in case.batches)
