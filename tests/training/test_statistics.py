"""Means, deviations and intervals."""

import math
import random
import time

import pytest
from scipy import stats

from maskconnect.training.statistics import paired_difference, pairs_needed, statistic, student, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 29, 30, 101])
def test_quantiles_are_students(freedom):
    assert student_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    for t in (0.0, 0.3, 2.0, 9.0):
        assert student(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), rel=1e-12)


def test_intervals_are_those_of_the_paired_t_test():
    chance = random.Random(0)
    ours = [chance.gauss(70, 1) for _ in range(6)]
    theirs = [chance.gauss(69, 1) for _ in range(6)]
    found = paired_difference(ours, theirs)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(sum(ours) / 6 - sum(theirs) / 6)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([71.0, 72.0, 71.5, 71.8], [69.0, 70.1, 69.4, 69.9], "better, at n=4"),
        ([69.0, 70.1, 69.4, 69.9], [71.0, 72.0, 71.5, 71.8], "worse, at n=4"),
        ([70.0, 71.0], [70.5, 70.6], "no significant difference at n=2"),
        ([90.5, 90.7], [90.0, 90.2], "all 2 pairs differ by the same: no interval"),
        ([75.0], [70.0], "one pair shows nothing"),
        ([], [], "no pair"),
    ],
)
def test_verdicts_are_plain(ours, theirs, verdict):
    assert paired_difference(ours, theirs).verdict == verdict


def test_a_mean_has_a_deviation_from_two_values_on():
    assert statistic([1.0, 2.0, 3.0]).text() == "2.00 ± 1.00"
    assert statistic([1.0]).text() == "1.00"


@pytest.mark.parametrize(("deviation", "difference"), [(1.4, 0.5), (0.6, 0.5), (2.6, 1.0), (0.1, 0.5)])
def test_with_that_number_of_pairs_a_paired_t_test_has_a_power_of_four_in_five(deviation, difference):
    def power(n):
        away, critical = difference / deviation * n**0.5, stats.t.ppf(0.975, n - 1)
        return stats.nct.sf(critical, n - 1, away) + stats.nct.cdf(-critical, n - 1, away)

    n = pairs_needed(deviation, difference)
    assert power(n) > 0.79
    assert n < 5 or power(n - 2) < 0.80


def test_nobody_knows_how_many_pairs_one_pair_asks_for():
    assert paired_difference([1.0], [0.0]).pairs_to_see(0.5) is None
    assert paired_difference([1.0, 2.0, 2.5], [0.0, 0.5, 2.0]).pairs_to_see(0.5) == pairs_needed(0.5, 0.5)


@pytest.mark.parametrize("freedom", [1000, 1001, 5000, 10**6, 10**12])
@pytest.mark.parametrize("probability", [0.8, 0.975])
def test_quantiles_of_many_degrees_of_freedom_are_students_too(freedom, probability):
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-12)


def test_a_tiny_difference_is_answered_at_once():
    start = time.monotonic()
    n = pairs_needed(1.0, 0.0005)
    assert time.monotonic() - start < 5
    assert n == pytest.approx(((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) / 0.0005) ** 2, rel=1e-6)


def test_that_number_of_pairs_shows_the_difference_and_one_pair_less_does_not():
    def visible(n):
        return (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) / math.sqrt(n)

    for difference in (2.0, 0.5, 0.1, 0.08, 0.05, 0.02):
        n = pairs_needed(1.0, difference)
        assert visible(n) <= difference < visible(n - 1)
