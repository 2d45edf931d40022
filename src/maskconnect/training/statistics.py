"""Statistics over several runs: means, deviations, and confidence intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

MANY = 1000
"""From this number of degrees of freedom on, Student's quantile comes from a series, because finite sums are slow."""


@dataclass(frozen=True)
class Statistic:
    """The mean and deviation over several runs."""

    count: int
    mean: float
    deviation: float | None  # of a sample; None for a single run

    def text(self, digits: int = 2) -> str:
        """Return the mean and deviation as text."""
        spread = "" if self.deviation is None else f" ± {self.deviation:,.{digits}f}"
        return f"{self.mean:,.{digits}f}{spread}"


def statistic(values: Sequence[float]) -> Statistic:
    """Return the mean and the sample standard deviation."""
    return Statistic(len(values), fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Difference:
    """The difference between two things over pairs of runs."""

    pairs: tuple[float, ...]  # the difference of each pair
    mean: float
    interval: tuple[float, float] | None  # of 95 %; None if pairs do not vary, or for a single pair
    deviation: float | None = None  # of the pairs; None for a single pair

    @property
    def count(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def text(self, digits: int = 2) -> str:
        """Return the difference and its interval as text; empty without an interval."""
        if self.interval is None:
            return ""
        mean, low, high = (f"{x:+,.{digits}f}" for x in (self.mean, *self.interval))
        return f"{mean} ({low} to {high})"

    def pairs_to_see(self, difference: float) -> int | None:
        """Return the number of pairs that it takes to detect this difference; None without an interval."""
        return None if self.interval is None or self.deviation is None else pairs_needed(self.deviation, difference)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def verdict(self) -> str:
        """The conclusion, in words."""
        if self.interval is None:
            few = ("no pair", "one pair shows nothing")
            return few[self.count] if self.count < 2 else f"all {self.count} pairs differ by the same: no interval"
        if self.interval[0] > 0:
            return f"better, at n={self.count}"
        if self.interval[1] < 0:
            return f"worse, at n={self.count}"
        return f"no significant difference at n={self.count}"


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of ours - theirs over pairs, with Student's confidence interval."""
    pairs = tuple(a - b for a, b in zip(ours, theirs, strict=True))
    count, mean = len(pairs), fmean(pairs) if pairs else 0.0
    if count < 2 or max(pairs) - min(pairs) < 1e-9:
        return Difference(pairs, mean, None)
    deviation = stdev(pairs)
    half = student_quantile(0.975, count - 1) * deviation / math.sqrt(count)
    return Difference(pairs, mean, (mean - half, mean + half), deviation)


def pairs_needed(deviation: float, difference: float) -> int:
    """Return the number of pairs that detect a true `difference` with 80 % power at the 95 % level.

    The power calculation of a paired t-test, with Student's quantiles instead of normal ones: the smallest n with
    (t(0.975) + t(0.8)) * deviation / sqrt(n) <= difference.
    """

    def visible(n: int) -> float:
        return (student_quantile(0.975, n - 1) + student_quantile(0.8, n - 1)) * deviation / math.sqrt(n)

    high = 2
    while visible(high) > difference:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle >= 2 and visible(middle) <= difference else (middle, high)
    return high


def difference_by_seed(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Return the paired difference over the seeds that both have."""
    seeds = [seed for seed in ours if seed in theirs]
    return paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for a probability above 0.5, by bisection; from MANY degrees, a series."""
    if freedom >= MANY:
        return _quantile_of_many(NormalDist().inv_cdf(probability), freedom)
    low, high = 0.0, 1.0
    while student(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _quantile_of_many(z: float, freedom: int) -> float:
    """Return Fisher's series for the quantile; from 1,000 degrees of freedom on, its next term is below 1e-13."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def student(t: float, freedom: int) -> float:
    """Return P(T <= t) for an integer number of degrees of freedom, by finite sums."""
    odd, angle = freedom % 2, math.atan(t / math.sqrt(freedom))
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total if freedom > 1 else 0.0
    return 0.5 + (inside + angle if odd else inside * math.pi / 2) / math.pi
