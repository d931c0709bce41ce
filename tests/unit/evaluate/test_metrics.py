"""Intervals against published and hand-computed values."""

from __future__ import annotations

import math

import pytest

from rlkv.errors import DataError
from rlkv.evaluate.metrics import (
    accuracy,
    bootstrap_interval,
    example_means,
    paired_difference,
    wilson_interval,
)
from rlkv.evaluate.records import Record


def record(key, reward, sample=0):
    reason = "correct" if reward == 1 else "wrong"
    return Record(key, sample, reward, reason, None, "", "", "stop", 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I,
        # method 3 (score, no continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_values(successes, n, low, high):
    found = wilson_interval(successes, n)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)
    assert found.value == successes / n


def test_wilson_contains_the_share_at_the_ends():
    assert wilson_interval(20, 20).high == 1.0
    assert wilson_interval(0, 20).low == 0.0
    assert wilson_interval(500, 500).low == pytest.approx(0.99238, abs=1e-5)


def test_bootstrap_is_close_to_the_normal_interval_and_repeatable():
    values = [0.25, 0.5, 0.75, 1.0] * 100
    found = bootstrap_interval(values)
    error = 1.96 * math.sqrt(sum((v - 0.625) ** 2 for v in values) / 400) / math.sqrt(400)
    assert found.value == 0.625
    # 10,000 resamples: the ends have a standard error under 0.001
    assert found.low == pytest.approx(0.625 - error, abs=0.003)
    assert found.high == pytest.approx(0.625 + error, abs=0.003)
    assert found == bootstrap_interval(values)


def test_several_samples_count_as_one_example():
    records = [record("a", 1.0), record("a", 0.0, 1), record("b", 1.0), record("b", 1.0, 1)]
    assert example_means(records) == {"a": 0.5, "b": 1.0}
    found = accuracy(records)
    assert found.value == 0.75
    assert 0.5 <= found.low < found.high <= 1.0


def test_binary_scores_use_wilson():
    records = [record(str(i), float(i < 9)) for i in range(10)]
    assert accuracy(records) == wilson_interval(9, 10)


def test_paired_difference_equals_newcombes_published_example():
    # Newcombe (1998), "Improved confidence intervals for the difference between binomial
    # proportions based on paired data": of 50 pairs 36 both, 12 first only, 2 second only; method
    # 10 gives 0.0569 to 0.3404
    ours = {str(i): float(i < 48) for i in range(50)}
    theirs = {str(i): float(i < 36 or i >= 48) for i in range(50)}
    found = paired_difference(ours, theirs)
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.0569, abs=5e-5)
    assert found.high == pytest.approx(0.3404, abs=5e-5)
    assert found.excludes_zero


def test_paired_difference_corrects_a_positive_correlation():
    # of 21 pairs 1 both, 1 first only, 7 second only, 12 neither: 1·12 - 1·7 is under 21 / 2, so
    # method 10 counts no correlation and Wilson's distances add in squares
    ours = {str(i): float(i < 2) for i in range(21)}
    theirs = {str(i): float(i == 0 or 2 <= i < 9) for i in range(21)}
    found = paired_difference(ours, theirs)
    assert found.value == pytest.approx(-6 / 21)
    assert found.low == pytest.approx(-0.5069, abs=5e-5)
    assert found.high == pytest.approx(-0.0256, abs=5e-5)


def test_equal_results_leave_room_for_chance():
    scores = {str(i): 1.0 for i in range(50)}
    found = paired_difference(scores, scores)
    assert found.value == 0.0
    assert found.low < 0 < found.high


def test_paired_fractional_scores_ignore_what_examples_share():
    # the examples differ wildly, the methods by exactly 0.1 on each
    theirs = {str(i): (i % 10) / 20 for i in range(100)}
    ours = {key: value + 0.1 for key, value in theirs.items()}
    found = paired_difference(ours, theirs)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)


def test_nothing_to_average_is_an_error():
    with pytest.raises(DataError, match="no examples"):
        accuracy([])
    with pytest.raises(DataError, match="share no example"):
        paired_difference({"a": 1.0}, {"b": 1.0})
