"""Accuracy with honest intervals.

Scores of 0 and 1 get Wilson's interval; fractional scores, and means of several samples, get a
bootstrap over examples, because samples of one example are not independent. Differences between
methods are paired by example, which is what makes them small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkv.errors import DataError
from rlkv.evaluate.records import Record

Z_95 = 1.959963984540054
"""Quantile of the normal distribution for two-sided 95 % intervals."""
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval.

    Example:
        >>> wilson_interval(9, 10)
        Estimate(value=0.9, low=0.5958..., high=0.9821...)
    """

    value: float
    """The mean."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""

    @property
    def excludes_zero(self) -> bool:
        """True where the interval lies on one side of 0: a difference that is not chance."""
        return self.low > 0 or self.high < 0


def wilson_interval(successes: float, n: int, z: float = Z_95) -> Estimate:
    """Share of successes with Wilson's score interval.

    Args:
        successes: Number of successes, at most ``n``.
        n: Number of trials, at least 1.
        z: Normal quantile.

    Raises:
        DataError: ``n`` is 0.
    """
    if n < 1:
        raise DataError("no examples to average over; expected at least one")
    share = successes / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    center = share + z * z / (2 * n)
    scale = 1 + z * z / n
    # rounding must not push an end past the share when all or none succeed
    low = min(max(0.0, (center - spread) / scale), share)
    high = max(min(1.0, (center + spread) / scale), share)
    return Estimate(share, low, high)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of independent values with a percentile bootstrap interval (10,000 resamples).

    Raises:
        DataError: There are no values.
    """
    if not len(values):
        raise DataError("no examples to average over; expected at least one")
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    # in blocks: 10,000 resamples of 10,000 values at once would take 800 MB
    block = max(1, min(_RESAMPLES, 2_000_000 // len(data)))
    for start in range(0, _RESAMPLES, block):
        stop = min(start + block, _RESAMPLES)
        means[start:stop] = data[rng.integers(0, len(data), (stop - start, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(data.mean()), float(low), float(high))


def example_means(records: Sequence[Record]) -> dict[str, float]:
    """Mean reward of each example over its samples, in order of first appearance."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        rewards[record.id].append(record.reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()}


def accuracy(records: Sequence[Record]) -> Estimate:
    """Mean reward over examples, with the interval that fits its kind of score.

    Raises:
        DataError: There are no records.
    """
    means = list(example_means(records).values())
    if all(value in (0.0, 1.0) for value in means):
        return wilson_interval(sum(means), len(means))
    return bootstrap_interval(means)


def paired_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Estimate:
    """Mean of ours - theirs over the examples that both have, with a 95 % interval.

    Scores of 0 and 1 use Newcombe's method for paired proportions (1998, method 10), which stays
    honest when hardly any example differs; others a bootstrap of the differences.

    Args:
        ours: Mean reward by example id, see :func:`example_means`.
        theirs: The same of the method compared with.

    Raises:
        DataError: No example is in both.
    """
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise DataError("the two results share no example id; compare runs of the same task")
    a = [ours[key] for key in shared]
    b = [theirs[key] for key in shared]
    if all(value in (0.0, 1.0) for value in (*a, *b)):
        return _newcombe(a, b)
    return bootstrap_interval([x - y for x, y in zip(a, b, strict=True)])


def _newcombe(a: Sequence[float], b: Sequence[float]) -> Estimate:
    n = len(a)
    both = sum(x * y for x, y in zip(a, b, strict=True))
    first, second = wilson_interval(sum(a), n), wilson_interval(sum(b), n)
    only_a, only_b = sum(a) - both, sum(b) - both
    neither = n - both - only_a - only_b
    product = sum(a) * (n - sum(a)) * sum(b) * (n - sum(b))
    agreement = both * neither - only_a * only_b
    # method 10 takes n / 2 off a positive one: few pairs must not claim much correlation
    agreement = max(0.0, agreement - n / 2) if agreement > 0 else agreement
    phi = agreement / math.sqrt(product) if product else 0.0
    below, above = first.value - first.low, second.high - second.value
    drop = math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    below, above = second.value - second.low, first.high - first.value
    rise = math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    value = first.value - second.value
    return Estimate(value, max(-1.0, value - drop), min(1.0, value + rise))
