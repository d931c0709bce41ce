"""EvictingLayer: storage, masks, budgets of padded rows, and what is refused."""

from __future__ import annotations

import pytest
import torch

from rlkv.cache.layer import tensor_bytes
from rlkv.core.budget import Budget
from rlkv.core.slot_plan import SlotPlan
from rlkv.errors import ConfigError, UnsupportedFeatureError
from rlkv.methods.base import MethodOptions
from rlkv.methods.h2o import H2O
from rlkv.methods.r_kv import RKV
from rlkv.methods.snapkv import SnapKV
from rlkv.methods.streaming_llm import StreamingLLM
from tests.drive import SPEC, Sequence, drive, held_positions, random_sequence

BUDGET = Budget(0.5, sink=8, recent=24)
PROPORTIONAL = MethodOptions(streaming_recent="proportional")
METHODS = {
    "h2o": H2O(SPEC, BUDGET),
    "r_kv": RKV(SPEC, BUDGET),
    "snapkv": SnapKV(SPEC, BUDGET),
    "streaming": StreamingLLM(SPEC, BUDGET, options=PROPORTIONAL),
}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def padded(sequence: Sequence, starts: list[int]) -> Sequence:
    return Sequence(sequence.queries, sequence.keys, sequence.values, torch.tensor(starts))


@pytest.mark.parametrize("starts", [[0, 23, 7], [0, 1, 2]])
@pytest.mark.parametrize("sizes", [[50] + [1] * 60, [20] * 5 + [1] * 10, [1, 60, 49]])
def test_padded_rows_equal_rows_alone(method, starts, sizes):
    sequence = padded(random_sequence(3, 110, seed=1), starts)
    batch = method.make_layer(0)
    found = drive(batch, sequence, sizes)
    for row, start in enumerate(starts):
        alone, left, own = method.make_layer(0), start, []
        for size in sizes:
            own.append(max(0, size - left))
            left = max(0, left - size)
        expected = drive(alone, sequence.row(row), [size for size in own if size])
        assert (found[row : row + 1, :, start:] - expected).abs().max() < 1e-5
        for head in range(3):
            held = held_positions(batch, row, head)
            if alone.positions is None:
                assert held == list(range(110 - start))
            else:
                assert held == held_positions(alone, 0, head)


@pytest.mark.parametrize("mode", ["authors", "fixed"])
@pytest.mark.parametrize("kind", [H2O, RKV, SnapKV])
def test_padded_rows_equal_rows_alone_under_the_authors_budgets(kind, mode):
    options = MethodOptions(budget_mode=mode, budget_tokens=20)
    method = kind(SPEC, Budget(0.9, sink=8, recent=24), options=options)
    sequence = padded(random_sequence(2, 220, seed=6), [0, 13])
    batch, alone = method.make_layer(0), method.make_layer(0)
    found = drive(batch, sequence, [150] + [1] * 70)[1:, :, 13:]
    expected = drive(alone, sequence.row(1), [137] + [1] * 70)
    assert (found - expected).abs().max() < 1e-5
    assert batch.positions is not None


def test_every_slot_holds_the_key_and_value_of_its_position(method):
    sequence = padded(random_sequence(2, 90, seed=2), [0, 11])
    layer = method.make_layer(1)
    drive(layer, sequence, [40] + [1] * 50)
    for row, start in enumerate([0, 11]):
        for head in range(3):
            for slot, position in enumerate(layer.positions[row, head].tolist()):
                if position >= 0:
                    column = position + start
                    assert torch.equal(
                        layer.keys[row, head, slot], sequence.keys[row, head, column]
                    )
                    value = sequence.values[row, head, column]
                    assert torch.equal(layer.values[row, head, slot], value)


def test_pads_never_count_in_a_budget(method):
    sequence = padded(random_sequence(2, 100, seed=3), [0, 40])
    layer = method.make_layer(0)
    drive(layer, sequence, [60] + [1] * 40)
    for row, length in enumerate([100, 60]):
        held = held_positions(layer, row)
        assert len(held) == layer.counts[row] <= layer.plan.after(length)
        assert len(held) > layer.plan.after(length) * 0.8


def test_all_layers_together_fill_the_budget(method):
    for length in (33, 40, 57, 100, 700, 5000):
        total = 0
        for index in range(SPEC.num_layers):
            plan = method.make_layer(index).plan
            slot = SPEC.bytes_per_token_per_head + plan.slot_overhead
            queries = plan.queries_held(length) * SPEC.num_query_heads * SPEC.head_dim * 4
            total += plan.slots(length) * SPEC.num_kv_heads * slot + queries
        allowed = BUDGET.kv_bytes(SPEC, length)
        assert total <= allowed
        if length > 300:
            assert total >= 0.99 * allowed


def test_nothing_is_evicted_up_to_sink_plus_recent(method):
    layer = method.make_layer(0)
    drive(layer, random_sequence(2, 32), [5] + [1] * 27)
    assert layer.positions is None
    assert layer.nbytes() == 2 * 32 * SPEC.num_kv_heads * SPEC.bytes_per_token_per_head
    assert layer.keys.untyped_storage().nbytes() == tensor_bytes(layer.keys)


def test_crop_works_while_whole_and_is_refused_after(method):
    sequence = random_sequence(1, 60, seed=4)
    layer = method.make_layer(0)
    drive(layer, sequence, [30])
    layer.crop(20)
    assert layer.seen == layer.keys.shape[2] == 20
    again = drive(layer, sequence, [40], past=20)
    fresh = method.make_layer(0)
    expected = drive(fresh, sequence, [20, 40])[:, :, 20:]
    assert torch.equal(again, expected)
    layer.crop(60)
    with pytest.raises(UnsupportedFeatureError, match="takes back 5 cached tokens"):
        layer.crop(55)


def test_fixed_budget_is_reached_at_any_sparsity():
    options = MethodOptions(budget_mode="fixed", budget_tokens=20)
    layer = H2O(SPEC, Budget(0.0), options=options).make_layer(0)
    drive(layer, random_sequence(1, 50), [10] + [1] * 40)
    assert len(held_positions(layer)) == 20


def test_a_window_too_small_for_the_query_cache_is_refused():
    with pytest.raises(ConfigError, match="larger window"):
        RKV(SPEC, Budget(0.9, sink=2, recent=6))
    options = MethodOptions(budget_mode="fixed", budget_tokens=8)
    with pytest.raises(ConfigError, match="budget_tokens 8"):
        RKV(SPEC, Budget(0.5), options=options)


@pytest.mark.parametrize("field", ["budget_mode", "streaming_recent"])
def test_unknown_options_are_refused(field):
    with pytest.raises(ConfigError, match="'often' is unknown"):
        MethodOptions(**{field: "often"})


def test_slots_grow_by_steps_that_cost_half_a_percent_at_most():
    plan = SlotPlan(SPEC, Budget(0.5), layer=0)
    sizes = [plan.slots(length) for length in range(3000, 3400)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 150
    for length, slots in zip(range(3000, 3400), sizes, strict=True):
        exact = Budget(0.5).kv_bytes(SPEC, length) / SPEC.kv_bytes(1)
        assert exact * 0.995 - 1 <= slots <= exact + 1
