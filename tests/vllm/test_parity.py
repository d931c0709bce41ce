"""Greedy tokens of the plugin equal the masked-dense reference, whatever the scheduler does."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import (
    ARCHITECTURES,
    PROMPT_LENGTHS,
    engine,
    greedy,
    in_child,
    leaked_blocks,
    prompts,
    scheduler,
    watch,
)

pytestmark = pytest.mark.vllm
SINK, RECENT = 16, 64


def assert_equal_reference(model, sparsity, requests, completions, sink=SINK, recent=RECENT):
    differing = differences(model, model.full(sparsity), requests, completions, sink, recent)
    assert not differing


def differences(model, full, requests, completions, sink=SINK, recent=RECENT) -> dict:
    """Requests whose tokens the reference would not have chosen, with the first such token."""
    from tests.vllm.masked_reference import compare, load_reference

    def task():
        reference = load_reference(model.folder, full, sink, recent)
        pairs = zip(requests, completions, strict=True)
        found = [compare(reference, prompt, tokens) for prompt, tokens in pairs]
        return {
            i: (x.first_difference, x.margin)
            for i, x in enumerate(found)
            if x.first_difference is not None
        }

    return in_child(task)


@pytest.fixture(scope="session")
def plain_run(tiny_models):
    """Sixteen llama requests at s = 0.5 under chunked prefill: what several tests compare with."""
    requests = prompts()

    def task():
        llm = engine(tiny_models["llama"], 0.5)
        return greedy(llm, requests, 40), leaked_blocks(llm)

    completions, leaked = in_child(task)
    assert leaked == 0
    return requests, completions


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.25])
def test_chunked_prefill_equals_reference(tiny_models, name, sparsity):
    model, requests = tiny_models[name], prompts()
    assert len(requests) >= 16
    assert (min(PROMPT_LENGTHS), max(PROMPT_LENGTHS)) == (17, 2000)

    def task():
        llm = engine(model, sparsity)
        return greedy(llm, requests, 32), leaked_blocks(llm)

    completions, leaked = in_child(task)
    assert leaked == 0
    assert_equal_reference(model, sparsity, requests, completions)


@pytest.mark.parametrize(
    ("sink", "recent"),
    [(SINK, RECENT - 1), (SINK, RECENT + 1), (SINK - 1, RECENT), (SINK + 1, RECENT)],
)
def test_another_window_would_give_other_tokens(tiny_models, plain_run, sink, recent):
    requests, completions = plain_run
    model = tiny_models["llama"]
    found = differences(model, model.full(0.5), requests, completions, sink, recent)
    # prompts shorter than the window never drop a key; all others must differ
    assert len(found) >= 10


def test_dense_attention_would_give_other_tokens(tiny_models, plain_run):
    requests, completions = plain_run
    model = tiny_models["llama"]
    assert len(differences(model, model.full(0.0), requests, completions)) >= 10


@pytest.mark.parametrize(("sink", "recent"), [(32, 16), (0, 48), (16, 200), (64, 128)])
def test_other_windows_equal_reference(tiny_models, sink, recent):
    model, requests = tiny_models["qwen3"], prompts()

    def task():
        llm = engine(model, 0.5, rlkv={"sink": sink, "recent": recent})
        return greedy(llm, requests, 24)

    assert_equal_reference(model, 0.5, requests, in_child(task), sink, recent)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_forced_preemption_keeps_tokens(tiny_models, name):
    model, requests = tiny_models[name], prompts((400, 350, 300, 280, 260, 250, 240, 230))

    def task():
        llm = engine(model, 0.5, num_gpu_blocks_override=72, max_model_len=640)
        counts = watch(llm)
        return greedy(llm, requests, 200), counts, leaked_blocks(llm)

    completions, counts, leaked = in_child(task)
    assert counts["preemptions"] > 0
    assert leaked == 0
    assert_equal_reference(model, 0.5, requests, completions)


@pytest.mark.parametrize("sparsity", [0.5, 0.75])
def test_prefix_cache_hits_keep_tokens(tiny_models, sparsity):
    model = tiny_models["qwen3"]
    first = prompts((100, 300, 900, 1500))
    # the same prompts again, the same with other endings, and a follow-up turn
    second = [
        *first,
        *[ids[:-70] + tail for ids, tail in zip(first, prompts((90,) * 4, 5), strict=True)],
    ]

    def task():
        llm = engine(model, sparsity)
        once = greedy(llm, first, 100)
        turns = [ids + more + [7, 8, 9] for ids, more in zip(first, once, strict=True)]
        hits = []
        results = []
        for batch in (second, turns):
            tokens, hit = greedy_with_hits(llm, batch, 24)
            results.append(tokens)
            hits.append(hit)
        return once, results, turns, hits, leaked_blocks(llm)

    once, results, turns, hits, leaked = in_child(task)
    assert all(hit > 0 for hit in hits)
    assert leaked == 0
    for requests, completions in ((first, once), (second, results[0]), (turns, results[1])):
        assert_equal_reference(model, sparsity, requests, completions)


def greedy_with_hits(llm, requests, tokens) -> tuple[list[list[int]], int]:
    """Greedy completions, and how many prompt tokens came from the prefix cache."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in requests],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    return completions, sum(output.num_cached_tokens for output in outputs)


def test_compiled_model_equals_reference(tiny_models):
    model, requests = tiny_models["llama"], prompts()

    def task():
        return greedy(engine(model, 0.5, enforce_eager=False), requests, 32)

    assert_equal_reference(model, 0.5, requests, in_child(task))


def test_absent_config_leaves_vllm_as_it_is(tiny_models):
    model, requests = tiny_models["llama"], prompts((40, 300, 900))

    def task():
        llm = engine(model, None)
        groups = scheduler(llm).kv_cache_config.kv_cache_groups
        return greedy(llm, requests, 24), len(groups)

    completions, groups = in_child(task)
    assert groups == 1
    assert_equal_reference(model, 0.0, requests, completions)


def test_sparsity_zero_is_stock_vllm(tiny_models):
    model, requests = tiny_models["llama"], prompts((40, 300, 900))

    def task():
        llm = engine(model, 0.0)
        return greedy(llm, requests, 24), len(scheduler(llm).kv_cache_config.kv_cache_groups)

    completions, groups = in_child(task)
    assert groups == 1
    assert_equal_reference(model, 0.0, requests, completions)
