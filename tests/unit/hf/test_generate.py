"""`model.generate` inside `rlkv.compress`: beams, sequences, drafts, second turns, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from rlkv.errors import ConfigError, UnsupportedFeatureError, UnsupportedModelError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates, compress
from rlkv.methods.base import MethodOptions
from tests.tiny import SINK, holding, random_tokens, reference_logits, tiny_model
from tests.unit.hf.test_parity import MASK, WINDOW, chunked_logits, compressed, profile_of

OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def padded():
    tokens = random_tokens(3, 30, seed=11)
    mask = torch.ones_like(tokens)
    mask[1, :12] = 0
    tokens[1, :12] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def masked_dense(model, **inputs):
    """The same heads cut by mask over a full cache: what the split cache must reproduce."""
    gates = Gates.binary(torch.tensor(MASK) > 0.5)
    with attach_gates(model, gates, **WINDOW):
        return model.generate(**inputs)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 60},
        {"max_new_tokens": 40, "num_beams": 3},
        {"max_new_tokens": 40, "num_beams": 4, "num_return_sequences": 2},
        {"max_new_tokens": 40, "prefill_chunk_size": 8},
    ],
)
def test_generate_equals_masked_dense(model, padded, settings):
    inputs = {**padded, **OPTIONS, **settings}
    expected = masked_dense(model, **inputs)
    with compressed(model):
        assert torch.equal(model.generate(**inputs), expected)


def test_num_return_sequences_with_sampling_equals_masked_dense(model, padded):
    inputs = {**padded, **OPTIONS, "max_new_tokens": 30, "do_sample": True}
    inputs["num_return_sequences"] = 3
    torch.manual_seed(5)
    expected = masked_dense(model, **inputs)
    torch.manual_seed(5)
    with compressed(model):
        assert torch.equal(model.generate(**inputs), expected)


def test_prompt_lookup_equals_plain_greedy_with_draft_tokens(model):
    tokens = random_tokens(1, 12, seed=12).repeat(1, 5)
    with compressed(model):
        plain = model.generate(tokens, max_new_tokens=60, **OPTIONS)
    with compressed(model, options=MethodOptions(draft_tokens=10)):
        drafted = model.generate(tokens, max_new_tokens=60, prompt_lookup_num_tokens=8, **OPTIONS)
    assert torch.equal(plain, drafted)


def test_prompt_lookup_without_draft_tokens_says_what_to_do(model):
    tokens = random_tokens(1, 12, seed=12).repeat(1, 5)
    with compressed(model), pytest.raises(UnsupportedFeatureError, match="draft_tokens="):
        model.generate(tokens, max_new_tokens=60, prompt_lookup_num_tokens=8, **OPTIONS)


def test_second_turn_with_the_same_cache_equals_one_conversation(model):
    first, second = random_tokens(1, 25, seed=13), random_tokens(1, 9, seed=14)
    with compressed(model) as session:
        cache = session.new_cache()
        answer = model.generate(first, **holding(model, cache), max_new_tokens=20, **OPTIONS)
        whole = torch.cat([answer, second], 1)
        reused = model.generate(whole, **holding(model, cache), max_new_tokens=20, **OPTIONS)
        fresh = model.generate(whole, max_new_tokens=20, **OPTIONS)
    assert torch.equal(reused, fresh)


def test_local_heads_stay_constant_while_full_heads_grow(model):
    tokens = random_tokens(1, 50, seed=15)
    per_token_head = 2 * 16 * 4
    full, local = int(MASK.sum()), int((1 - MASK).sum())
    with compressed(model) as session:
        cache = session.new_cache()
        model.generate(tokens, **holding(model, cache), max_new_tokens=51, **OPTIONS)
        window = sum(WINDOW.values())
        # the last sampled token is not in the cache yet
        assert cache.nbytes() == (full * 100 + local * window) * per_token_head


def test_other_caches_are_refused(model):
    tokens = random_tokens(1, 10)
    used = DynamicCache(config=model.config)
    model(tokens, **holding(model, used))
    with compressed(model):
        with pytest.raises(UnsupportedFeatureError, match="DynamicCache with 10 tokens"):
            model(tokens, **holding(model, used))
        with pytest.raises(UnsupportedFeatureError, match="cache_implementation"):
            model(tokens, **holding(model, StaticCache(config=model.config, max_cache_len=64)))


def gates_attached(model):
    return attach_gates(model, Gates.binary(torch.tensor(MASK) > 0.5), **WINDOW)


@pytest.mark.parametrize(
    ("make", "name"), [(compressed, "compress"), (gates_attached, "attach_gates")]
)
def test_a_cache_is_refused_outside_its_block(model, make, name):
    tokens = random_tokens(1, 10)
    with make(model) as session:
        cache = session.new_cache()
        model(tokens, **holding(model, cache))
    says = rf"cache of rlkv\.{name} was passed outside its `with` block"
    with pytest.raises(UnsupportedFeatureError, match=says):
        model(random_tokens(1, 1), **holding(model, cache))
    more = torch.cat([tokens, random_tokens(1, 3)], 1)
    with pytest.raises(UnsupportedFeatureError, match=says):
        model.generate(more, **holding(model, cache), max_new_tokens=2, **OPTIONS)
    with make(model):  # another block of the same kind reads it
        after = model(random_tokens(1, 1), **holding(model, cache)).logits
    assert cache.get_seq_length() == 11
    assert torch.isfinite(after).all()


@pytest.mark.parametrize(
    ("make", "other", "says"),
    [
        (compressed, gates_attached, r"rlkv\.compress was passed inside rlkv\.attach_gates"),
        (gates_attached, compressed, r"rlkv\.attach_gates was passed inside rlkv\.compress"),
    ],
)
def test_gates_and_methods_do_not_share_a_cache(model, make, other, says):
    with make(model) as session:
        cache = session.new_cache()
        model(random_tokens(1, 10), **holding(model, cache))
    with other(model), pytest.raises(UnsupportedFeatureError, match=says):
        model(random_tokens(1, 1), **holding(model, cache))


@pytest.mark.parametrize("make", [compressed, gates_attached])
def test_a_model_without_weights_is_refused(make):
    empty = tiny_model("qwen3").to("meta")
    with pytest.raises(ConfigError, match="weights on the meta device"), make(empty):
        pass


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"attention_mask": torch.ones(1, 1, 10, 10, dtype=torch.bool)}, "2-D padding mask"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_cannot_be_right_is_refused(model, inputs, says):
    with compressed(model), pytest.raises(UnsupportedFeatureError, match=says):
        model(random_tokens(1, 10), **inputs)


def test_right_padding_is_refused_in_decode(model):
    tokens = random_tokens(2, 10)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    with compressed(model), pytest.raises(UnsupportedFeatureError, match="left padding"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=3, **OPTIONS)


def test_nesting_is_refused(model):
    with (
        compressed(model),
        pytest.raises(ConfigError, match="compressed already"),
        compressed(model),
    ):
        pass


def test_sliding_window_model_is_refused_by_name():
    mistral = tiny_model("mistral", sliding_window=16)
    with (
        pytest.raises(UnsupportedModelError, match="sliding window"),
        compress(mistral, method="full"),
    ):
        pass


def test_hybrid_model_keeps_its_sliding_layers():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = tiny_model(
        "qwen3", layer_types=types, use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    tokens = random_tokens(2, 40, seed=16)
    stock = hybrid(tokens).logits
    with compress(hybrid, method="full", **WINDOW) as session:
        assert session.spec.shape == (1, 4)
        assert session.spec.layer_indices == (1,)
        assert (hybrid(tokens).logits - stock).abs().max() <= 1e-5
    greedy = hybrid.generate(tokens, max_new_tokens=20, **OPTIONS)
    with compress(hybrid, method="full", **WINDOW):
        assert torch.equal(hybrid.generate(tokens, max_new_tokens=20, **OPTIONS), greedy)


def test_profile_of_another_model_is_refused_before_anything_happens(model):
    other = tiny_model("llama")
    with (
        pytest.raises(ValueError, match="--any-model"),
        compress(model, profile=profile_of(other), sparsity=0.5, sink=SINK),
    ):
        pass


def test_tokens_taken_back_under_the_window_are_forgotten(model):
    tokens, more = random_tokens(1, 10, seed=17), random_tokens(1, 20, seed=18)
    whole = torch.cat([tokens[:, :5], more], 1)
    expected = reference_logits(model, whole, torch.tensor(MASK))[:, 5:]
    with compressed(model) as session, torch.no_grad():
        cache = session.new_cache()
        model(tokens, **holding(model, cache))
        cache.crop(-5)
        found = [model(more[:, i : i + 1], **holding(model, cache)).logits for i in range(20)]
    assert (torch.cat(found, 1) - expected).abs().max() <= 1e-5


def test_taking_back_more_than_there_is_empties_the_cache(model):
    tokens = random_tokens(1, 10, seed=17)
    with compressed(model) as session:
        cache = session.new_cache()
        model(tokens, **holding(model, cache))
        cache.crop(-15)
        assert cache.get_seq_length() == 0
        again = model(tokens, **holding(model, cache)).logits
        assert (again - model(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("gated", [True, False])
def test_packed_sequences_are_refused(model, gated):
    positions = torch.arange(10).repeat(2)[None]
    attached = attach_gates(model, Gates((3, 4)), **WINDOW) if gated else compressed(model)
    with attached, pytest.raises(UnsupportedFeatureError, match="packed into one row"):
        model(random_tokens(1, 20), position_ids=positions, use_cache=False)


def test_a_mask_of_the_new_tokens_alone_is_refused(model, padded):
    with compressed(model) as session:
        cache = session.new_cache()
        model(**padded, **holding(model, cache))
        with pytest.raises(UnsupportedFeatureError, match="covers 1 tokens, expected all 31"):
            model(random_tokens(3, 1), attention_mask=torch.ones(3, 1), **holding(model, cache))


@pytest.mark.parametrize("sizes", [[5] * 7, [1] * 35])
def test_a_row_may_be_padding_for_several_chunks(model, sizes):
    tokens = random_tokens(2, 35, seed=20)
    mask = torch.ones_like(tokens)
    mask[1, :23] = 0
    expected = reference_logits(model, tokens, torch.tensor(MASK), first_real=[0, 23])
    with compressed(model):
        found = chunked_logits(model, tokens, sizes, mask)
    assert (found[0] - expected[0]).abs().max() <= 1e-5
    assert (found[1, 23:] - expected[1, 23:]).abs().max() <= 1e-5


def test_an_empty_cache_that_was_replaced_is_refused_the_second_time(model):
    own = DynamicCache(config=model.config)
    with compressed(model):
        model(random_tokens(1, 9), **holding(model, own))
        with pytest.raises(UnsupportedFeatureError, match="a second time"):
            model(random_tokens(1, 1), **holding(model, own))


def test_copies_inside_the_block_are_refused(model):
    with compressed(model), pytest.raises(UnsupportedFeatureError, match="copied inside"):
        copy.deepcopy(model)
    copy.deepcopy(model)


@pytest.mark.parametrize("start", [3, 13])
def test_hybrid_model_with_padding_equals_the_stock_model(start):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = tiny_model(
        "qwen3", layer_types=types, use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    hybrid.config._attn_implementation = "sdpa"
    tokens = random_tokens(2, 30, seed=19)
    mask = torch.ones_like(tokens)
    mask[1, :start] = 0
    sizes = [20, 1, 1, 5, 1, 1, 1]
    stock = chunked_logits(hybrid, tokens, sizes, mask)
    with compress(hybrid, method="full", **WINDOW):
        found = chunked_logits(hybrid, tokens, sizes, mask)
    assert (found[0] - stock[0]).abs().max() <= 1e-5
    assert (found[1, start:] - stock[1, start:]).abs().max() <= 1e-5
