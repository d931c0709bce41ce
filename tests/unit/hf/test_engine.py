"""HFEngine: the same tokens as `model.generate`, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlkv.core.engine import Prompt, SamplingParams
from rlkv.errors import ConfigError, PromptTooLongError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates, compress, spec_of
from rlkv.hf.engine import HFEngine, left_padded
from rlkv.hf.loading import LoadedModel
from rlkv.hf.sampling import filtered_probs, next_tokens, row_generator
from tests.tiny import random_tokens, tiny_model
from tests.unit.hf.test_parity import MASK, WINDOW, profile_of, sparsity_of


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w96", padding_side="left"
    )


@pytest.fixture(scope="module")
def loaded():
    model = tiny_model("llama")
    return LoadedModel(model, word_tokenizer(), spec_of(model))


@pytest.fixture(scope="module")
def prompts():
    lengths = (30, 7, 18, 25, 30)
    return [
        Prompt(f"p{i}", tuple(random_tokens(1, n, seed=20 + i)[0].tolist()))
        for i, n in enumerate(lengths)
    ]


def completions(loaded, prompts, params, batch_size):
    profile = profile_of(loaded.model)
    with compress(loaded.model, profile=profile, sparsity=sparsity_of(), **WINDOW) as session:
        return HFEngine(loaded, session, batch_size=batch_size).generate(prompts, params)


def test_greedy_equals_model_generate(loaded, prompts):
    params = SamplingParams(max_new_tokens=50)
    found = completions(loaded, prompts, params, batch_size=4)
    profile = profile_of(loaded.model)
    with compress(loaded.model, profile=profile, sparsity=sparsity_of(), **WINDOW):
        for prompt, (completion,) in zip(prompts, found, strict=True):
            tokens = torch.tensor([prompt.token_ids])
            whole = loaded.model.generate(tokens, max_new_tokens=50, do_sample=False)
            assert list(completion.token_ids) == whole[0, tokens.shape[1] :].tolist()


def test_draws_do_not_depend_on_the_batch(loaded, prompts):
    params = SamplingParams(max_new_tokens=40, temperature=1.0, num_samples=3, seed=7)
    together = completions(loaded, prompts, params, batch_size=16)
    apart = completions(loaded, prompts[::-1], params, batch_size=2)[::-1]
    # bytes include the batch's padding, so they alone may differ
    for one, other in zip(together, apart, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
    assert len({c.token_ids for c in together[0]}) == 3


def test_finish_reasons_and_measured_bytes(loaded, prompts):
    (completion,) = completions(loaded, prompts[:1], SamplingParams(max_new_tokens=6), 1)[0]
    assert completion.finish_reason == "length"
    # 35 tokens are cached: the sixth new token is never fed back
    full, local = int(MASK.sum()), int((1 - MASK).sum())
    assert completion.kv_bytes == (full * 35 + local * 16) * 2 * 16 * 4


def test_prompt_beyond_the_positions_is_refused(loaded, prompts):
    with pytest.raises(PromptTooLongError, match="may grow by 5000, but tiny-llama holds 4096"):
        completions(loaded, prompts, SamplingParams(max_new_tokens=5000), 2)


def test_several_greedy_samples_are_refused():
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(max_new_tokens=5, num_samples=2)


def test_top_p_and_top_k_keep_the_stated_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = filtered_probs(logits, SamplingParams(1, temperature=1.0, top_p=0.7))
    assert (kept[0] > 0).tolist() == [True, True, False, False]
    kept = filtered_probs(logits, SamplingParams(1, temperature=1.0, top_k=3))
    assert (kept[0] > 0).tolist() == [True, True, True, False]


def test_draws_follow_the_distribution():
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).expand(4000, 3)
    params = SamplingParams(1, temperature=1.0)
    sources = [row_generator(0, str(i), 0) for i in range(4000)]
    counts = next_tokens(logits, params, sources).bincount(minlength=3) / 4000
    # 4000 draws: standard error under 0.008
    assert (counts - torch.tensor([0.1, 0.6, 0.3])).abs().max() < 0.03


def test_left_padding_marks_real_tokens():
    tokens, mask = left_padded([[5, 6, 7], [8]], pad_id=0)
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_refilled_places_give_the_same_tokens_in_fewer_steps(loaded, temperature):
    lengths = (30, 7, 18, 25, 30, 12, 22, 9, 28)
    limits = (3, 20, 5, 11, 2, 17, 8, 14, 6)
    prompts = [
        Prompt(f"p{i}", tuple(random_tokens(1, n, seed=40 + i)[0].tolist()), limit)
        for i, (n, limit) in enumerate(zip(lengths, limits, strict=True))
    ]
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3)
    gates = Gates(loaded.spec.shape, 0.6)
    found, rows_fed = {}, {}
    for refill in (False, True):
        fed: list[tuple[int, int]] = []
        hook = loaded.model.register_forward_pre_hook(
            lambda module, args, kwargs, fed=fed: fed.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        with attach_gates(loaded.model, gates, **WINDOW) as session:
            engine = HFEngine(loaded, session, batch_size=4, refill=refill)
            found[refill] = engine.generate(prompts, params)
            columns = [layer.seen for layer in session._last.rlkv_layers()]
        hook.remove()
        rows_fed[refill] = [rows for rows, new in fed if new == 1]
        assert max(rows for rows, _ in fed) == 4
        assert max(columns) <= 30 + 20
    tokens = {k: [one.token_ids for (one,) in v] for k, v in found.items()}
    assert tokens[True] == tokens[False]
    written = sum(len(ids) for ids in tokens[True])
    # every row is fed all of its tokens but the last: a finished one never
    assert sum(rows_fed[True]) == sum(rows_fed[False]) == written - len(prompts)
    assert len(rows_fed[True]) < len(rows_fed[False])


def test_a_compressed_cache_is_not_refilled(loaded, prompts):
    params = SamplingParams(max_new_tokens=12)
    profile = profile_of(loaded.model)
    with compress(loaded.model, profile=profile, sparsity=sparsity_of(), **WINDOW) as session:
        assert not session.new_cache().can_join
        found = HFEngine(loaded, session, batch_size=2, refill=True).generate(prompts, params)
    assert found == completions(loaded, prompts, params, batch_size=2)
