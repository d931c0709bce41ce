"""What every method promises, run over all names in the registry.

A new method is a new file in rlkv/methods and is tested here without being named. Tolerance 1e-5:
float32 logits of order 1, with sums taken in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkv.cache.layer import CacheLayer
from rlkv.core.budget import Budget
from rlkv.core.engine import Prompt, SamplingParams
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import ConfigError
from rlkv.hf.attach import compress, spec_of
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel
from rlkv.methods.base import EvictingMethod, MethodOptions
from rlkv.registry import METHODS
from tests.tiny import holding, random_tokens, tiny_model
from tests.unit.hf.test_engine import word_tokenizer
from tests.unit.hf.test_parity import chunked_logits

TOLERANCE = 1e-5
WINDOW = {"sink": 8, "recent": 24}
BUDGET = Budget(0.5, **WINDOW)
PROMPT, DECODE = 50, 3 * BUDGET.window + 4
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROPORTIONAL = MethodOptions(streaming_recent="proportional")
CASES = [(name, MethodOptions()) for name in METHODS.names()] + [("streaming_llm", PROPORTIONAL)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].streaming_recent}")
def case(request):
    return request.param


def profile_of(model) -> HeadProfile:
    spec = spec_of(model)
    scores = np.random.default_rng(0).random(spec.shape).astype(np.float32)
    return HeadProfile(spec, scores, "test")


def compressed(model, case, sparsity=0.5):
    name, options = case
    profile = profile_of(model) if METHODS.load(name).needs_profile else None
    settings = {"method": name, "profile": profile, "sparsity": sparsity, "options": options}
    return compress(model, **settings, **WINDOW)


def method_of(model, case):
    name, options = case
    return METHODS.load(name)(spec_of(model), BUDGET, profile_of(model), options)


def tensors_of(layer: CacheLayer) -> list[Tensor]:
    """Every tensor that hangs on a layer, found by walking its attributes."""
    found, seen, stack = [], set(), [layer]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif type(item).__module__.startswith("rlkv") and hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return found


def stored_bytes(cache, empty) -> int:
    """Size of all storages in a cache, but for those that an empty cache has too (indices)."""
    sizes = {}
    for adapter, bare in zip(cache.layers, empty.layers, strict=True):
        indices = {len(t.untyped_storage()) for t in tensors_of(bare.layer)}
        for tensor in tensors_of(adapter.layer):
            storage = tensor.untyped_storage()
            if tensor.dim() > 1 or len(storage) not in indices:
                sizes[storage.data_ptr()] = len(storage)
    return sum(sizes.values())


def test_sparsity_0_equals_the_full_cache(model, case):
    tokens = random_tokens(2, PROMPT + DECODE, seed=1)
    if method_of(model, case).ignores_sparsity:
        pytest.skip(f"{case[0]} with these options has the same cache at every sparsity")
    stock = model(tokens).logits
    with compressed(model, case, sparsity=0.0):
        found = chunked_logits(model, tokens, [PROMPT] + [1] * DECODE)
    assert (found - stock).abs().max() <= TOLERANCE


def test_no_method_but_full_equals_the_full_cache_at_sparsity_half(model, case):
    tokens = random_tokens(1, PROMPT + DECODE, seed=1)
    with compressed(model, case):
        found = chunked_logits(model, tokens, [PROMPT] + [1] * DECODE)
    differs = (found - model(tokens).logits).abs().max() > 0.05
    assert differs == (case[0] != "full")


def test_never_above_the_budget_and_nbytes_is_the_real_size(model, case):
    tokens = random_tokens(2, PROMPT + DECODE, seed=2)
    method = method_of(model, case)
    budget = Budget(0.0, **WINDOW) if case[0] == "full" else BUDGET
    # growing buffers of full heads hold up to 1/128 spare room; evicting layers hold none
    spare = 1.0 if isinstance(method, EvictingMethod) or case[1] is PROPORTIONAL else 1 + 1 / 128
    with compressed(model, case) as session:
        cache, empty, start = session.new_cache(), session.new_cache(), 0
        for size in [PROMPT] + [1] * DECODE:
            with torch.no_grad():
                model(tokens[:, start : start + size], **holding(model, cache), use_cache=True)
            start += size
            assert cache.nbytes() <= 2 * budget.kv_bytes(session.spec, start) * spare, start
            assert cache.nbytes() == stored_bytes(cache, empty), start


def test_never_above_the_budget_from_a_short_prompt(model, case):
    tokens = random_tokens(1, 3 * BUDGET.window, seed=3)
    budget = Budget(0.0, **WINDOW) if case[0] == "full" else BUDGET
    with compressed(model, case) as session:
        cache = session.new_cache()
        for start in range(tokens.shape[1]):
            with torch.no_grad():
                model(tokens[:, start : start + 1], **holding(model, cache), use_cache=True)
            allowed = budget.kv_bytes(session.spec, start + 1)
            assert cache.nbytes() <= allowed * (1 + 1 / 128), start


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.8])
def test_equal_bytes_within_one_percent_of_the_head_split(model, case, sparsity):
    method = method_of(model, case)
    if case[0] == "full" or method.ignores_sparsity:
        pytest.skip(f"{case[0]} with these options is not held to a budget")
    tokens, budget = random_tokens(1, 1030, seed=4), Budget(sparsity, **WINDOW)
    split = split_bytes(model, tokens[:, :1000], sparsity)
    with compressed(model, case, sparsity) as session, torch.no_grad():
        cache = session.new_cache()
        model(tokens[:, :1000], **holding(model, cache), use_cache=True)
        assert 0.99 <= cache.nbytes() / split <= 1.0
        for i in range(1000, 1030):
            model(tokens[:, i : i + 1], **holding(model, cache), use_cache=True)
            assert 0.99 <= cache.nbytes() / budget.kv_bytes(session.spec, i + 1) <= 1.01, i


def split_bytes(model, tokens, sparsity) -> int:
    """Measured bytes of the head split after a prompt."""
    with compress(model, method="random_heads", sparsity=sparsity, **WINDOW) as session:
        cache = session.new_cache()
        model(tokens, **holding(model, cache), use_cache=True)
        return cache.nbytes()


def test_padded_rows_equal_the_rows_alone(model, case):
    tokens = random_tokens(3, PROMPT + DECODE, seed=5)
    starts = [0, 23, 7]
    mask = torch.ones_like(tokens)
    for row, start in enumerate(starts):
        mask[row, :start] = 0
        tokens[row, :start] = 0
    steps = [1] * DECODE
    with compressed(model, case):
        batch = chunked_logits(model, tokens, [PROMPT, *steps], mask)
        for row, start in enumerate(starts):
            alone = tokens[row : row + 1, start:]
            found = chunked_logits(model, alone, [PROMPT - start, *steps])
            assert (batch[row, start:] - found[0]).abs().max() <= TOLERANCE, row


def test_chunked_prefill_equals_one_shot_where_promised(model, case):
    if not method_of(model, case).chunk_exact:
        pytest.skip(f"{case[0]} cuts the prompt after each pass, as its docstring says")
    tokens = random_tokens(2, 90, seed=6)
    with compressed(model, case):
        one_shot = chunked_logits(model, tokens, [90])
        for sizes in ([9] * 10, [1, 35, 54]):
            found = chunked_logits(model, tokens, sizes)
            assert (found - one_shot).abs().max() <= TOLERANCE, sizes


def test_chunked_prefill_stays_in_budget_and_sees_the_past(model, case):
    tokens = random_tokens(2, 150, seed=7)
    mask = torch.ones_like(tokens)
    mask[1, :20] = 0
    budget = Budget(0.0, **WINDOW) if case[0] == "full" else BUDGET
    with compressed(model, case) as session:
        padded = chunked_logits(model, tokens, [40] * 3 + [1] * 30, mask)
        assert session.kv_bytes() <= 2 * budget.kv_bytes(session.spec, 150) * (1 + 1 / 128)
        alone = chunked_logits(model, tokens[1:, 20:], [20] + [40] * 2 + [1] * 30)
    assert (padded[1, 20:] - alone[0]).abs().max() <= TOLERANCE


def test_reordered_rows_go_on_as_the_rows_they_were(model, case):
    tokens = random_tokens(3, PROMPT + 60, seed=8)
    rows = torch.tensor([2, 0, 2])
    with compressed(model, case) as session:
        straight = chunked_logits(model, tokens[rows], [PROMPT] + [1] * 60)
        cache = session.new_cache()
        with torch.no_grad():
            for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + 30))]:
                model(tokens[:, start:stop], **holding(model, cache), use_cache=True)
            cache.select_rows(rows)
            for i in range(PROMPT + 30, PROMPT + 60):
                found = model(
                    tokens[rows, i : i + 1], **holding(model, cache), use_cache=True
                ).logits
                assert (found[:, 0] - straight[:, i]).abs().max() <= TOLERANCE, i


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}]
)
def test_generate_works_and_repeats(model, case, settings):
    tokens = random_tokens(2, 40, seed=9)
    mask = torch.ones_like(tokens)
    mask[1, :15] = 0
    inputs = {**OPTIONS, "max_new_tokens": 50, **settings}
    with compressed(model, case) as session:
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append(model.generate(tokens, attention_mask=mask, **inputs))
        assert torch.equal(*found)
        assert found[0].shape[1] == 90
        assert session.kv_bytes() > 0


def test_greedy_generate_equals_token_by_token(model, case):
    prompt = random_tokens(1, 40, seed=10)
    with compressed(model, case):
        whole = model.generate(prompt, max_new_tokens=60, **OPTIONS)
        logits = chunked_logits(model, whole, [40] + [1] * 60)
    assert torch.equal(logits[0, 39:-1].argmax(-1), whole[0, 40:])


def test_engine_rows_equal_rows_alone_while_others_leave(case):
    model = tiny_model("llama")
    loaded = LoadedModel(model, word_tokenizer(), spec_of(model))
    prompts = [
        Prompt(f"p{n}", tuple(random_tokens(1, n, seed=n)[0].tolist())) for n in (31, 7, 29, 40)
    ]
    params = SamplingParams(max_new_tokens=70)
    found = []
    for batch_size in (4, 1):
        with compressed(model, case) as session:
            rows = HFEngine(loaded, session, batch_size=batch_size).generate(prompts, params)
        found.append([row.token_ids for (row,) in rows])
    assert found[0] == found[1]


def test_reset_serves_a_new_batch(model, case):
    first, second = random_tokens(2, 90, seed=11), random_tokens(3, 70, seed=12)
    with compressed(model, case) as session, torch.no_grad():
        cache = session.new_cache()
        model(first, **holding(model, cache), use_cache=True)
        cache.reset()
        assert cache.nbytes() == 0
        again = model(second, **holding(model, cache), use_cache=True).logits
        assert torch.equal(again, model(second, use_cache=True).logits)


def test_leaving_restores_the_model_bit_for_bit(model, case):
    tokens = random_tokens(2, 60, seed=13)
    before = model(tokens).logits
    attributes = [set(vars(module)) for module in model.modules()]
    with compressed(model, case):
        model.generate(tokens, max_new_tokens=5, **OPTIONS)
    assert torch.equal(model(tokens).logits, before)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", METHODS.names())
def test_a_missing_profile_is_refused_in_one_sentence(model, name):
    if not METHODS.load(name).needs_profile:
        METHODS.load(name)(spec_of(model), BUDGET)
        return
    with pytest.raises(ConfigError, match=f"method {name} needs a head profile") as error:
        METHODS.load(name)(spec_of(model), BUDGET)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", METHODS.names())
def test_name_file_and_summary_agree(name):
    assert METHODS.load(name).name == name
    assert len(METHODS.summary(name)) <= 100
