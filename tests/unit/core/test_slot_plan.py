"""SlotPlan: slots at every length, in the three budget modes."""

from __future__ import annotations

import doctest

import pytest

from rlkv.core import slot_plan
from rlkv.core.budget import Budget
from rlkv.core.model_spec import ModelSpec
from rlkv.core.slot_plan import SlotPlan

SPEC = ModelSpec("m", "", num_layers=3, num_kv_heads=4, num_query_heads=8, head_dim=64)


def bytes_of(plan: SlotPlan, length: int) -> int:
    overhead = plan.slot_overhead if length > plan.whole_until else 0
    slot = SPEC.bytes_per_token_per_head + overhead
    queries = plan.queries_held(length) * SPEC.num_query_heads * SPEC.head_dim * SPEC.dtype_bytes
    return plan.slots(length) * SPEC.num_kv_heads * slot + queries


def test_example_of_the_docstring():
    assert doctest.testmod(slot_plan).failed == 0


@pytest.mark.parametrize("sparsity", [0.1, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("overhead", "queries"), [(0, 0), (4, 0), (8, 0), (4, 8)])
def test_equal_bytes_at_every_length(sparsity, overhead, queries):
    budget = Budget(sparsity)
    plans = [
        SlotPlan(SPEC, budget, layer, slot_overhead=overhead, queries=queries) for layer in range(3)
    ]
    for length in [*range(1, 200), 999, 5000, 64001]:
        total, allowed = (
            sum(bytes_of(plan, length) for plan in plans),
            budget.kv_bytes(SPEC, length),
        )
        assert total <= allowed, length
        if length > 900:
            assert total >= 0.99 * allowed, length


def test_up_to_the_window_everything_is_kept_and_nothing_else_held():
    plan = SlotPlan(SPEC, Budget(0.9), 0, slot_overhead=8, queries=8)
    for length in range(1, 81):
        assert (plan.slots(length), plan.after(length)) == (length, length)
        assert plan.queries_held(length) == 0
    assert plan.after(81) < 80
    assert [plan.queries_held(n) for n in (81, 84, 88, 500)] == [1, 4, 8, 8]


@pytest.mark.parametrize("mode", ["equal", "authors", "fixed"])
@pytest.mark.parametrize("in_intervals", [True, False])
def test_after_a_pass_the_next_token_has_room(mode, in_intervals):
    plan = SlotPlan(
        SPEC, Budget(0.5), 1, mode, 60, slot_overhead=4, queries=8, in_intervals=in_intervals
    )
    for length in range(1, 3000):
        assert 1 <= plan.target(length) <= plan.after(length) <= plan.slots(length)
        if length > plan.whole_until:
            assert plan.after(length) < plan.slots(length + 1)


def test_the_authors_rules():
    budget = Budget(0.5)
    h2o = SlotPlan(SPEC, budget, 0, "authors")
    assert h2o.after(1000) == 500 + 80
    r_kv = SlotPlan(SPEC, budget, 0, "authors", queries=8, in_intervals=True)
    assert r_kv.target(1000) == 500 + 80 - 8
    assert r_kv.slots(1000) == 500 + 80 - 8 + 128
    fixed = SlotPlan(SPEC, budget, 0, "fixed", 128, queries=8, in_intervals=True)
    assert (fixed.whole_until, fixed.target(5000), fixed.slots(5000)) == (255, 128, 256)
