"""Analyses against hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlkv.core.head_profile import HeadProfile
from rlkv.core.import_scores import import_scores
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import DataError
from rlkv.evaluate.analyses import (
    bytes_section,
    error_section,
    length_section,
    overlap_section,
    spearman,
    top_overlap,
)
from rlkv.evaluate.records import Record, Row
from rlkv.evaluate.report import CellData
from rlkv.evaluate.study import reversed_profile

SPEC = ModelSpec("m", "", 2, 4, 8, 16)


def profile(scores):
    return HeadProfile(SPEC, np.array(scores, dtype=np.float32).reshape(2, 4), "test")


def record(key, reward, tokens=10, text="", finish="stop", kv_bytes=50):
    reason = "correct" if reward == 1 else "wrong"
    return Record(key, 0, reward, reason, None, text, "", finish, 5, tokens, kv_bytes, 100)


def cell(method, sparsity, *records):
    row = Row("m", "t", method, sparsity, 16, 64, len(records), 0.5, 0.4, 0.6, 50.0, 10.0)
    return CellData(row, records)


def test_spearman_equals_hand_computed_values():
    a = np.arange(8, dtype=np.float32)
    assert spearman(a, a) == pytest.approx(1.0)
    assert spearman(a, -a) == pytest.approx(-1.0)
    # 1 - 6 Σd² / (n (n² - 1)) with d = (1, -1, 0, …): 1 - 12 / 504
    swapped = np.array([1, 0, 2, 3, 4, 5, 6, 7], dtype=np.float32)
    assert spearman(a, swapped) == pytest.approx(1 - 12 / 504)
    # ties share their mean rank: ranks (0.5, 0.5, 2) against (0, 1, 2)
    tied = spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    assert tied == pytest.approx(np.sqrt(3) / 2)


def test_spearman_needs_a_ranking():
    with pytest.raises(DataError, match="same score"):
        spearman(np.ones(4), np.arange(4.0))


def test_top_overlap_counts_shared_heads():
    a = profile([0.9, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1])
    b = profile([0.9, 0.1, 0.7, 0.2, 0.8, 0.3, 0.6, 0.0])
    assert top_overlap(a, b, 0.5) == 0.5  # b's best four are heads 0, 4, 2, 6
    assert top_overlap(a, a, 0.25) == 1.0


def test_overlap_lists_each_pair_of_one_shape():
    other = HeadProfile(ModelSpec("n", "", 1, 4, 4, 16), np.ones((1, 4), np.float32), "x")
    a, b = profile(np.linspace(0, 1, 8)), profile(np.linspace(1, 0, 8))
    section = overlap_section({"a": a, "b": b, "other": other}, [0.5])
    assert section.rows == (("a", "b", pytest.approx(-1.0), 0.0),)


def test_published_rankings_agree_as_known(shared_data):
    # rank agreement of the published Llama scores, computed independently: 0.475; 70 % of the best
    # half in common
    spec = ModelSpec("llama", "", 32, 8, 32, 128)
    folder = shared_data / "head_scores"
    rlkv = import_scores(folder / "rlkv-llama-3.1-8b-r1.adapter_weights.tsv", spec)
    duo = import_scores(folder / "duo-llama-3.1-8b-r1.full_attention_heads.tsv", spec)
    assert spearman(rlkv.scores, duo.scores) == pytest.approx(0.475, abs=0.002)
    assert top_overlap(rlkv, duo, 0.5) == pytest.approx(0.70, abs=0.01)


def test_reversed_profile_compresses_the_best_heads_first():
    found = profile([0.5, 0.5, 0.9, 0.1, 0.5, 0.2, 0.8, 0.5])
    full = reversed_profile(found).full_heads(0.25)
    compressed = {tuple(map(int, head)) for head in zip(*np.nonzero(~full), strict=True)}
    assert compressed == set(found.ranking()[:2])
    # ties too: heads 0, 1 and 4 share a score, and the ranking takes the lowest first
    assert reversed_profile(found).ranking() == found.ranking()[::-1]


def test_lengths_are_compared_where_both_are_right():
    full = cell("full", 0.0, record("a", 1.0, 10), record("b", 1.0, 20), record("c", 0.0, 5))
    other = cell("rlkv", 0.5, record("a", 1.0, 15), record("b", 0.0, 90), record("c", 1.0, 5))
    (row,) = length_section([full, other]).records()
    assert row["solved by both"] == 1
    assert row["ratio"] == 1.5
    assert length_section([other]) is None


def test_errors_are_shares_of_completions():
    loop = "the time is now " * 60
    found = error_section(
        [
            cell(
                "full",
                0.0,
                record("a", 1.0),
                record("b", 0.0, text=loop, finish="length"),
                record("c", 0.0, text="well", finish="length"),
                record("d", 0.0, text="well"),
            )
        ]
    )
    (row,) = found.records()
    shares = [row[name] for name in ("correct", "repetition", "overlength", "incorrect")]
    assert shares == [0.25] * 4
    assert error_section([cell("full", 0.0, record("a", 1.0, finish="forced"))]) is None


def test_bytes_are_shares_of_the_full_cache():
    (row,) = bytes_section(
        [cell("rlkv", 0.5, record("a", 1.0), record("b", 1.0, kv_bytes=60))]
    ).records()
    assert row["share_mean"] == pytest.approx(0.55)
    assert row["share_max"] == 0.6
    assert row["of_budget_mean"] is None
    within = replace(record("a", 1.0), budget_bytes=40), replace(record("b", 1.0), budget_bytes=50)
    (row,) = bytes_section([cell("rlkv", 0.5, *within)]).records()
    assert (row["of_budget_mean"], row["of_budget_max"]) == (1.125, 1.25)
