"""H2O against a simulation that keeps everything and recomputes attention token by token."""

from __future__ import annotations

from dataclasses import replace

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
            # in bytes' worth of the head split no score is held before something is evicted
            if plan.mode != "equal" or max(length, prompt) > plan.whole_until:
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


@pytest.mark.parametrize("mode", ["authors", "fixed"])
@pytest.mark.parametrize("prompt", [1, 30])
def test_other_budgets_count_attention_from_the_first_token_on(mode, prompt):
    # whole up to 43 and 40 tokens, which is past the prompt: all attention up to there counts too
    options = MethodOptions(budget_mode=mode, budget_tokens=40)
    plan = H2O(SPEC, Budget(0.3, sink=4, recent=8), options=options).plan(1)
    assert 38 < plan.whole_until < 48
    sequence = random_sequence(1, 90, seed=prompt)
    layer = H2OLayer(plan)
    found = drive(layer, sequence, [prompt] + [1] * (90 - prompt))
    expected, held = simulate(sequence, prompt, plan)
    assert (found - expected).abs().max() < 1e-5
    assert [held_positions(layer, head=head) for head in range(3)] == held


@pytest.mark.parametrize("mode", ["authors", "fixed"])
def test_padded_rows_of_other_budgets_equal_the_rows_alone(mode):
    options = MethodOptions(budget_mode=mode, budget_tokens=40)
    plan = H2O(SPEC, Budget(0.3, sink=4, recent=8), options=options).plan(1)
    padded = replace(random_sequence(2, 80), first_real=torch.tensor([0, 17]))
    layer = H2OLayer(plan)
    found = drive(layer, padded, [30] + [1] * 50)
    for row, start in enumerate([0, 17]):
        alone = H2OLayer(plan)
        expected = drive(alone, padded.row(row), [30 - start] + [1] * 50)
        assert (found[row, :, start:] - expected[0]).abs().max() < 1e-5
        for head in range(3):
            assert held_positions(layer, row, head) == held_positions(alone, 0, head)


def test_taking_back_tokens_takes_back_their_scores():
    options = MethodOptions(budget_mode="fixed", budget_tokens=40)
    layer = H2OLayer(H2O(SPEC, Budget(0.3, sink=4, recent=8), options=options).plan(0))
    sequence = random_sequence(1, 20)
    drive(layer, sequence, [20])
    layer.crop(12)
    assert layer.scores is not None
    assert layer.scores.shape[2] == 12


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
