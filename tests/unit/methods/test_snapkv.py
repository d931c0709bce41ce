"""SnapKV's choice computed by hand, one head at a time."""

from __future__ import annotations

import torch

from rlkv.core.budget import Budget
from rlkv.methods.base import MethodOptions
from rlkv.methods.snapkv import SnapKV
from tests.drive import SCALE, SPEC, drive, held_positions, random_sequence


def chosen_by_hand(sequence, head: int, keep: int, window: int) -> list[int]:
    """Positions that head ``head`` of row 0 keeps after its prompt."""
    tokens, group = sequence.keys.shape[2], SPEC.group_size
    keys = sequence.keys[0, head]
    score = torch.zeros(tokens - window)
    for query_head in range(head * group, (head + 1) * group):
        for t in range(tokens - window, tokens):
            logits = sequence.queries[0, query_head, t] @ keys[: t + 1].T * SCALE
            score += logits.softmax(-1)[: tokens - window] / window / group
    padded = torch.cat([torch.zeros(2), score, torch.zeros(2)])
    pooled = torch.stack([padded[i : i + 5].sum() / 5 for i in range(tokens - window)])
    best = sorted(range(tokens - window), key=lambda i: -float(pooled[i]))[: keep - window]
    return sorted([*best, *range(tokens - window, tokens)])


def test_prompt_positions_equal_the_hand_computed_ones():
    options = MethodOptions(budget_mode="fixed", budget_tokens=150)
    layer = SnapKV(SPEC, Budget(0.5), options=options).make_layer(0)
    sequence = random_sequence(1, 400, seed=2)
    drive(layer, sequence, [400])
    for head in range(3):
        assert held_positions(layer, head=head) == chosen_by_hand(sequence, head, 150, 64)


def test_the_window_is_at_most_half_of_what_is_kept():
    options = MethodOptions(budget_mode="fixed", budget_tokens=40)
    layer = SnapKV(SPEC, Budget(0.5), options=options).make_layer(0)
    sequence = random_sequence(1, 300, seed=3)
    drive(layer, sequence, [300])
    for head in range(3):
        assert held_positions(layer, head=head) == chosen_by_hand(sequence, head, 40, 20)


def test_generated_tokens_stay_within_the_budget():
    layer = SnapKV(SPEC, Budget(0.5, sink=8, recent=40)).make_layer(0)
    sequence = random_sequence(1, 400, seed=4)
    drive(layer, sequence, [100])
    for i in range(100, 400):
        drive(layer, sequence, [1], past=i)
        assert len(held_positions(layer)) <= layer.plan.after(i + 1)
        assert held_positions(layer)[-8:] == list(range(i - 7, i + 1))
