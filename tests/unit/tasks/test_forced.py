"""Token ranges of character spans, by hand, and the verbatim verifier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkv.errors import DataError
from rlkv.tasks.forced import VerbatimVerifier, span_token_ranges


def test_a_span_gets_the_tokens_inside_it():
    # "lamp costs 42." as lamp| costs| |4|2|.
    offsets = [(0, 4), (4, 10), (10, 11), (11, 12), (12, 13), (13, 14)]
    assert span_token_ranges(offsets, [(11, 13), (0, 4)]) == [range(3, 5), range(0, 1)]


def test_a_token_over_the_edge_belongs_to_the_span():
    offsets = [(0, 3), (3, 8), (8, 9)]
    assert span_token_ranges(offsets, [(4, 6)]) == [range(1, 2)]
    assert span_token_ranges(offsets, [(2, 4)]) == [range(0, 2)]


def test_touching_without_overlap_does_not_count():
    assert span_token_ranges([(0, 2), (2, 4), (4, 6)], [(2, 4)]) == [range(1, 2)]


def test_special_tokens_of_zero_width_belong_to_no_span():
    assert span_token_ranges([(0, 0), (0, 2), (2, 2), (2, 3)], [(0, 2)]) == [range(1, 2)]


@pytest.mark.parametrize("span", [(5, 7), (1, 1)])
def test_a_span_without_tokens_is_refused(span):
    with pytest.raises(DataError, match="covers no token"):
        span_token_ranges([(0, 2), (2, 4)], [span])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.data())
def test_ranges_are_the_tokens_that_share_a_character(widths, data):
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    offsets = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
    start = data.draw(st.integers(0, ends[-1] - 1))
    end = data.draw(st.integers(start + 1, ends[-1]))
    shared = [i for i, (a, b) in enumerate(offsets) if set(range(a, b)) & set(range(start, end))]
    assert list(span_token_ranges(offsets, [(start, end)])[0]) == shared


@pytest.mark.parametrize(
    ("completion", "reward", "reason"),
    [("a 42 b", 1.0, "correct"), ("a  42 b\n", 1.0, "correct"), ("a 41 b", 0.0, "wrong")],
)
def test_verbatim_verifier_compares_words(completion, reward, reason):
    score = VerbatimVerifier()(completion, "a 42 b")
    assert (score.reward, score.reason) == (reward, reason)


def test_verbatim_verifier_on_nothing():
    assert VerbatimVerifier()(" \n", "a").reason == "no_answer"
