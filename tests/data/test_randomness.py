import numpy as np
import pytest
from scipy import stats

import maskconnect as mc
from maskconnect.data.augment import TOP
from maskconnect.data.randomness import order, uniform


def test_numbers_belong_to_the_image_whoever_else_is_asked_for():
    everyone = uniform(3, 7, np.arange(1000), 5)
    some = np.array([900, 2, 17])
    assert np.array_equal(uniform(3, 7, some, 5), everyone[some])
    assert np.array_equal(uniform(3, 7, some, 2), everyone[some, :2])


def splitmix(state):
    """The output function of SplitMix64, on Python's own integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_numbers_are_those_of_splitmix64_for_good():
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator, seeded with 0
    found = uniform(5, 9, np.array([0, 123_456]), 3)
    for row, index in zip(found, (0, 123_456), strict=True):
        image = splitmix(splitmix(splitmix(5) ^ 9) ^ index)
        wanted = [(splitmix((image + k * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for k in (1, 2, 3)]
        assert row.tolist() == wanted


@pytest.mark.parametrize("axis", ["seed", "epoch", "index", "column"])
def test_numbers_are_uniform_and_independent_along_every_axis(axis):
    if axis == "seed":
        found = np.array([uniform(s, 0, np.array([5]), 1)[0, 0] for s in range(4000)])
    elif axis == "epoch":
        found = np.array([uniform(0, e, np.array([5]), 1)[0, 0] for e in range(4000)])
    elif axis == "index":
        found = uniform(0, 0, np.arange(4000), 1)[:, 0]
    else:
        found = uniform(0, 0, np.array([5]), 4000)[0]
    assert found.min() >= 0
    assert found.max() < 1
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.05


def test_the_order_of_an_epoch_says_nothing_about_what_happens_to_its_images():
    place = np.empty(20_000)
    place[order(3, 1, 20_000)] = np.arange(20_000)
    numbers = uniform(3, 1, np.arange(20_000), 64)
    for column in range(TOP, 64):
        assert abs(stats.spearmanr(place, numbers[:, column]).statistic) < 0.03


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (2**63, 0), (0, -1)])
def test_a_seed_or_epoch_that_is_out_of_range_is_an_error(seed, epoch):
    with pytest.raises(mc.ConfigError, match="must be at least 0 and below"):
        order(seed, epoch, 5)


def test_an_order_is_a_permutation_that_changes_with_epoch_and_seed():
    orders = [order(seed, epoch, 500) for seed in range(2) for epoch in range(3)]
    for one in orders:
        assert sorted(one.tolist()) == list(range(500))
    for k, one in enumerate(orders):
        assert all((one == other).mean() < 0.05 for other in orders[:k])
    assert order(0, 0, 0).tolist() == []
