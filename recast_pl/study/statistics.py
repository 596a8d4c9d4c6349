"""Means, paired differences and what a study could have seen: pure functions of numbers.

The unit is a seed. Runs of one seed share prompts and noises, so strategies are compared within seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95
POWER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over n seeds and its confidence interval mean ± half."""

    mean: float
    half: float  # infinite for one seed, which says nothing of the spread
    deviation: float  # sample standard deviation over seeds; NaN for one
    count: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half


def interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """The mean and Student's interval for it.

        mean ± t_{(1 + level)/2, n − 1} · s / √n

    Args:
        values: one for each seed, all finite.
        level: of confidence, in (0, 1).

    Raises:
        ValueError: where there is no value, or one that is not finite.

    >>> found = interval([1.0, 2.0, 3.0])
    >>> round(found.mean, 3), round(found.half, 3)
    (2.0, 2.484)

    Reference: Student, "The probable error of a mean", 1908.
    """
    if not values or not all(isfinite(value) for value in values):
        raise ValueError(f"interval: expected at least one value, all finite, got {list(values)}")
    count, mean = len(values), float(np.mean(values))
    if count == 1:
        return Interval(mean=mean, half=inf, deviation=nan, count=1)
    deviation = float(np.std(values, ddof=1))
    half = float(stats.t.ppf((1 + level) / 2, count - 1)) * deviation / sqrt(count)
    return Interval(mean=mean, half=half, deviation=deviation, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A strategy less the baseline over the seeds that both have."""

    interval: Interval  # of the differences within seeds
    p: float  # two-sided, of the paired t test; NaN for one seed
    detectable: float  # what would have been seen with a power of 80 %

    @property
    def verdict(self) -> str:
        """`win` where the interval lies above zero, `loss` where below, else `tie`."""
        return "win" if self.interval.low > 0 else "loss" if self.interval.high < 0 else "tie"


def paired_difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`one` less `other`, paired by seed; None where no seed is in both.

    Args:
        one: values by seed.
        other: the baseline's.

    >>> found = paired_difference({0: 1.2, 1: 2.1, 2: 3.3}, {0: 1.0, 1: 2.0, 2: 3.0, 9: 7.0})
    >>> round(found.interval.mean, 3), round(found.interval.half, 3), found.verdict, round(found.p, 4)
    (0.2, 0.248, 'tie', 0.0742)
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        return None
    found = interval([one[seed] - other[seed] for seed in common])
    return Difference(
        interval=found,
        p=p_value(found),
        detectable=detectable_difference(found.deviation, found.count),
    )


def p_value(found: Interval) -> float:
    """Two-sided, of the t test that the mean is 0; 1 where all values are 0, NaN for one value."""
    if found.count < 2:
        return nan
    if found.deviation == 0:
        return 1.0 if found.mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(found.mean) * sqrt(found.count) / found.deviation, found.count - 1))


def power_of(difference: float, deviation: float, count: int, *, level: float = LEVEL) -> float:
    """The chance that a two-sided paired t test sees a true difference.

        P(|Z + δ √n / s| > t_{(1 + level)/2, n − 1} · √(χ²_{n−1} / (n − 1)))

    over a standard normal Z and an independent χ², by averaging over 10⁴ quantiles of the latter. (scipy's
    noncentral t distribution gives NaN for the few degrees of freedom that studies have.)
    """
    degrees = count - 1
    critical = stats.t.ppf((1 + level) / 2, degrees)
    quantiles = (np.arange(10_000) + 0.5) / 10_000
    border = critical * np.sqrt(stats.chi2.ppf(quantiles, degrees) / degrees)
    shift = difference * sqrt(count) / deviation
    return float(np.mean(stats.norm.sf(border - shift) + stats.norm.cdf(-border - shift)))


def detectable_difference(deviation: float, count: int, *, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true difference that a paired comparison sees with the given chance.

    Args:
        deviation: sample standard deviation of the differences within seeds; at least 0.
        count: seeds. For one the answer is infinite.
        level: of the interval that must exclude zero.
        power: the chance.

    The deviation is itself an estimate from few seeds, so this is a rough figure.

    >>> round(detectable_difference(1.0, 3), 2), round(detectable_difference(1.0, 34), 2)
    (3.26, 0.5)

    Reference: Cohen, "Statistical power analysis for the behavioral sciences", 1988.
    """
    if count < 2:
        return inf
    if deviation == 0:
        return 0.0
    found = optimize.brentq(lambda d: power_of(d, 1.0, count, level=level) - power, 0.0, 1e3)
    return float(found) * deviation


def holm(p_values: Sequence[float], *, level: float = LEVEL) -> list[bool]:
    """Which of several tests still reject when the chance of any false rejection is to stay below 1 − level.

    The smallest p-value is held against (1 − level)/m, the next one against (1 − level)/(m − 1), and so on
    until the first that does not reject. NaN rejects nothing and counts as a test.

    >>> holm([0.01, 0.04, 0.03])
    [True, False, False]

    Reference: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    order = sorted(
        range(len(p_values)), key=lambda index: (p_values[index] != p_values[index], p_values[index])
    )
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if not p_values[index] <= (1 - level) / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other one beats or equals in both coordinates and beats in one.

    In the order of the first coordinate, which rises.

    >>> front([(0, 2), (1, 1), (0, 1), (2, 0)])
    [0, 1, 3]
    """
    kept = [
        index
        for index, (x, y) in enumerate(points)
        if not any(a >= x and b >= y and (a > x or b > y) for a, b in points)
    ]
    return sorted(kept, key=lambda index: points[index])
