"""H2O against a simulation that keeps everything and recomputes attention token by token."""

from __future__ import annotations

import pytest
import torch

from rlkv.core.budget import Budget
from rlkv.core.slot_plan import SlotPlan
from rlkv.methods.base import MethodOptions
from rlkv.methods.h2o import H2O, H2OLayer
from tests.drive import SCALE, SPEC, drive, held_positions, random_sequence


def simulate(sequence, prompt: int, plan: SlotPlan):
    """Row 0 of ``sequence``: outputs after the prompt, and what each head holds at the end."""
    tokens, group = sequence.keys.shape[2], SPEC.group_size
    outputs, held = [], []
    for head in range(SPEC.num_kv_heads):
        q = sequence.queries[0, head * group : (head + 1) * group]
        k, v = sequence.keys[0, head], sequence.values[0, head]
        kept, score, out = list(range(prompt)), torch.zeros(tokens), []
        for t in range(tokens):
            if t >= prompt:
                kept.append(t)
            seen = [i for i in kept if i <= t]
            attention = (q[:, t] @ k[seen].T * SCALE).softmax(-1)
            out.append(attention @ v[seen])
            length = t + 1
            if max(length, prompt) > plan.whole_until:  # before that no score is held
                score[seen] += attention.sum(0)
            if length < prompt or len(kept) <= plan.after(length):
                continue
            room = plan.after(length)
            recent = set(range(length - (room - room // 2), length))
            hitters = sorted(set(kept) - recent, key=lambda i: -float(score[i]))
            kept = sorted(recent | set(hitters[: room // 2]))
        outputs.append(torch.stack(out, 1))
        held.append(kept)
    return torch.cat(outputs)[None], held


@pytest.mark.parametrize("prompt", [1, 12, 40])
@pytest.mark.parametrize("sparsity", [0.3, 0.8])
def test_h2o_equals_the_simulation(prompt, sparsity):
    sequence = random_sequence(1, 110, seed=prompt)
    plan = H2O(SPEC, Budget(sparsity, sink=4, recent=12)).plan(1)
    layer = H2OLayer(plan)
    found = drive(layer, sequence, [prompt] + [1] * (110 - prompt))
    expected, held = simulate(sequence, prompt, plan)
    assert (found - expected).abs().max() < 1e-5
    assert [held_positions(layer, head=head) for head in range(3)] == held


def test_half_of_what_is_kept_is_recent():
    layer = H2OLayer(H2O(SPEC, Budget(0.5, sink=4, recent=12)).plan(0))
    drive(layer, random_sequence(1, 90), [50] + [1] * 40)
    for head in range(3):
        held = held_positions(layer, head=head)
        recent = len(held) - len(held) // 2
        assert held[-recent:] == list(range(90 - recent, 90))
        assert held[: len(held) // 2] != list(range(90 - len(held), 90 - recent))


def test_prompt_scores_are_block_sums(monkeypatch):
    sequence = random_sequence(2, 70)
    plan = H2O(SPEC, Budget(0.5, sink=4, recent=12)).plan(0)
    whole, blocks = H2OLayer(plan), H2OLayer(plan)
    drive(whole, sequence, [70])
    monkeypatch.setattr("rlkv.cache.evicting._OBSERVED_BLOCK", 16)
    drive(blocks, sequence, [70])
    assert torch.equal(whole.positions, blocks.positions)
    assert (whole.scores - blocks.scores).abs().max() < 1e-5


def test_authors_budget_keeps_the_window_in_every_head():
    budget = Budget(0.5, sink=4, recent=12)
    method = H2O(SPEC, budget, options=MethodOptions(budget_mode="authors"))
    layer = method.make_layer(0)
    drive(layer, random_sequence(1, 101), [60] + [1] * 41)
    assert len(held_positions(layer)) == 101 // 2 + budget.window
