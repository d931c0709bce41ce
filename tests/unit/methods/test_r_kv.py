"""R-KV's score against a transcription of the formulas, one head and one key at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlkv.cache.query_window import QueryWindow
from rlkv.core.budget import Budget
from rlkv.methods.base import MethodOptions
from rlkv.methods.r_kv import RKV, importance, redundancy
from tests.drive import SCALE, SPEC, drive, held_positions, random_sequence


def slow_importance(q, k, window: int) -> list[float]:
    """q (group, queries, head_dim), k (tokens, head_dim): A of all but the last ``window`` keys."""
    tokens = len(k) - window
    mean = [0.0] * tokens
    for i in range(q.shape[1]):
        logits = [max(float(q[g, i] @ k[j]) * SCALE for g in range(len(q))) for j in range(tokens)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for j in range(tokens):
            mean[j] += weights[j] / sum(weights) / q.shape[1]
    return [max(mean[max(0, j - 3) : j + 4]) for j in range(tokens)]


def slow_redundancy(k) -> list[float]:
    """k (tokens, head_dim): R of every key."""
    tokens = len(k)
    cosine = [[float(k[i] @ k[j] / (k[i].norm() * k[j].norm())) for j in range(tokens)]
              for i in range(tokens)]  # fmt: skip
    for i in range(tokens):
        cosine[i][i] = 0.0
        near = [j for j in range(tokens) if cosine[i][j] > 0.5]
        cosine[i][near[-1] if near else 0] = 0.0
    mean = [sum(row[j] for row in cosine) / tokens for j in range(tokens)]
    total = sum(math.exp(x) for x in mean)
    return [math.exp(x) / total for x in mean]


@pytest.fixture(scope="module")
def sequence():
    return random_sequence(2, 30, seed=4)


def test_importance_equals_the_formula(sequence):
    queries = sequence.queries[:, :, -8:]
    window = QueryWindow(queries, torch.ones(2, 8, dtype=torch.bool), SCALE)
    scored = (torch.arange(30) < 22).expand(2, 3, 30)
    found = importance(window, sequence.keys, scored)
    for row in range(2):
        for head in range(3):
            q = queries[row, 2 * head : 2 * head + 2]
            expected = torch.tensor(slow_importance(q, sequence.keys[row, head], 8))
            assert (found[row, head, :22] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("block", [512, 7])
def test_redundancy_equals_the_formula(sequence, monkeypatch, block):
    monkeypatch.setattr("rlkv.methods.r_kv._BLOCK", block)
    found = redundancy(sequence.keys, torch.ones(2, 3, 30, dtype=torch.bool))
    for row in range(2):
        for head in range(3):
            expected = torch.tensor(slow_redundancy(sequence.keys[row, head]))
            assert (found[row, head] - expected).abs().max() < 1e-6


def test_redundancy_of_a_padded_row_is_that_of_the_row_alone(sequence):
    real = torch.ones(2, 3, 30, dtype=torch.bool)
    real[1, :, :9] = False
    padded = redundancy(sequence.keys, real)[1, :, 9:]
    alone = redundancy(sequence.keys[1:, :, 9:], real[:1, :, 9:])[0]
    assert (padded - alone).abs().max() < 1e-6


def test_the_newest_of_near_duplicates_is_kept():
    keys = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(1))
    keys[0, 0, 1] = keys[0, 0, 3] = keys[0, 0, 5]
    found = redundancy(keys, torch.ones(1, 1, 6, dtype=torch.bool))[0, 0]
    assert found[5] < found[1]
    assert found[5] < found[3]


@pytest.mark.parametrize(("mode", "most"), [("fixed", 48 + 128), ("authors", 350 // 2 + 24 + 128)])
def test_the_authors_budgets_grow_by_128_between_compressions(mode, most):
    options = MethodOptions(budget_mode=mode, budget_tokens=48)
    layer = RKV(SPEC, Budget(0.5, sink=8, recent=24), options=options).make_layer(0)
    sequence, sizes = random_sequence(1, 350), []
    for i in range(350):
        drive(layer, sequence, [1], past=i)
        sizes.append(i + 1 if layer.positions is None else len(held_positions(layer)))
    assert max(sizes) <= most
    drops = [before - after for before, after in itertools.pairwise(sizes)]
    assert max(drops) >= 120
    if mode == "fixed":
        assert min(sizes[48:]) == 48


def test_the_last_eight_tokens_always_stay():
    layer = RKV(SPEC, Budget(0.5, sink=8, recent=40)).make_layer(0)
    sequence = random_sequence(1, 300)
    drive(layer, sequence, [60])
    for i in range(60, 300):
        drive(layer, sequence, [1], past=i)
        for head in range(3):
            assert held_positions(layer, head=head)[-8:] == list(range(i - 7, i + 1))
