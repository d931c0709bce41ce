"""What a server does besides greedy batches, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.vllm.conftest import (
    ChildError,
    TinyModel,
    engine,
    greedy,
    in_child,
    leaked_blocks,
    prompts,
    scheduler,
)

pytestmark = pytest.mark.vllm


def test_plugin_is_found_by_its_entry_point():
    from importlib.metadata import entry_points

    found = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    assert found["rlkv"] == "rlkv.serve.vllm.plugin:register"


def test_several_completions_and_stop_tokens_leak_no_block(tiny_models):
    model, requests = tiny_models["llama"], prompts((30, 200, 700))

    def task():
        from vllm import SamplingParams

        llm = engine(model, 0.5)
        alone = greedy(llm, requests, 60)
        inputs = [{"prompt_token_ids": ids} for ids in requests]
        several = llm.generate(
            inputs,
            SamplingParams(n=3, top_k=1, max_tokens=60, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        stops = [tokens[40] for tokens in alone]
        stopped = [
            llm.generate(
                [text],
                SamplingParams(
                    temperature=0, max_tokens=60, stop_token_ids=[stop], detokenize=False
                ),
                use_tqdm=False,
            )[0].outputs[0]
            for text, stop in zip(inputs, stops, strict=True)
        ]
        return (
            alone,
            [[list(choice.token_ids) for choice in output.outputs] for output in several],
            [(list(choice.token_ids), choice.finish_reason) for choice in stopped],
            stops,
            leaked_blocks(llm),
        )

    alone, several, stopped, stops, leaked = in_child(task)
    assert leaked == 0
    for tokens, choices in zip(alone, several, strict=True):
        assert choices == [tokens] * 3
    for tokens, (found, reason), stop in zip(alone, stopped, stops, strict=True):
        assert found == tokens[: tokens.index(stop) + 1]
        assert reason == "stop"


def test_aborted_requests_give_all_their_blocks_back(tiny_models):
    model = tiny_models["qwen3"]

    def task():
        from vllm import SamplingParams

        llm = engine(model, 0.75)
        core = llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True, detokenize=False)
        for number, ids in enumerate(prompts((1500, 300, 900, 40))):
            core.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        for step in range(40):
            core.step()
            if step in (2, 11, 25, 39):  # in prefill, and in decode
                core.abort_request([str({2: 0, 11: 1, 25: 2, 39: 3}[step])], internal=False)
        while core.has_unfinished_requests():
            core.step()
        return leaked_blocks(llm)

    assert in_child(task) == 0


def test_long_requests_hold_a_constant_number_of_window_blocks(tiny_models):
    model = tiny_models["llama"]

    def task():
        from vllm import SamplingParams

        llm = engine(model, 0.5)
        core = llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
        core.add_request("0", {"prompt_token_ids": prompts((1500,))[0]}, sampling)
        held = []
        while core.has_unfinished_requests():
            core.step()
            managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
            rows = [next(iter(m.req_to_blocks.values()), []) for m in managers]
            held.append([sum(not block.is_null for block in row) for row in rows])
        return held[:-1]

    held = in_child(task)
    decode = [window for full, window in held[10:]]
    # 16 sink tokens and 64 recent ones in blocks of 16
    assert max(decode) <= 6
    assert min(decode) >= 5
    full = [full for full, window in held]
    assert full[-1] == math.ceil((1500 + 299) / 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rlkv": {"sparsity": 1.5}}, r"sparsity 1\.5 is outside"),
        ({"rlkv": {"sink": 4}}, "sink must be a multiple of 16"),
        ({"rlkv": {"sparcity": 0.5}}, "Did you mean sparsity"),
        ({"rlkv": {"profile": "/nowhere.json"}}, "cannot read profile /nowhere.json"),
        ({"kv_cache_dtype": "fp8"}, "a fp8 KV cache cannot be combined"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                 "prompt_lookup_max": 2}}, "speculative decoding cannot"),
        ({"enable_lora": True}, "LoRA"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager cannot"),
        ({"load_format": "sharded_state"}, "load format sharded_state cannot"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
         "a KV connector cannot"),
        ({"num_gpu_blocks_override": 40, "max_model_len": 400}, "lower --max-num-batched-tokens"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_in_one_sentence(tiny_models, options, message):
    with pytest.raises(ChildError, match=message):
        in_child(lambda: engine(tiny_models["llama"], 0.5, **options))


def test_another_models_profile_is_refused(tiny_models):
    mixed = TinyModel(tiny_models["qwen2"].folder, tiny_models["llama"].profile)
    with pytest.raises(ChildError, match="profile is for llama, model is"):
        in_child(lambda: engine(mixed, 0.5))


def test_half_of_the_heads_compressed_nearly_doubles_reported_concurrency(tiny_models):
    model = tiny_models["llama"]

    def concurrency(sparsity):
        def task():
            config = engine(model, sparsity).llm_engine.vllm_config.cache_config
            return config.kv_cache_max_concurrency

        return in_child(task)

    theory = 1 / (0.5 + 0.5 * 80 / 2304)
    assert concurrency(0.5) / concurrency(None) >= 0.95 * theory


@pytest.mark.parametrize("shape", [(32, 8), (28, 4), (36, 8)])
@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_plan_is_what_vllm_reports(tmp_path_factory, shape, sparsity):
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlkv.core.head_profile import HeadProfile
    from rlkv.core.model_spec import ModelSpec
    from rlkv.serve.plan import Pool, plan_rows

    layers, heads = shape
    folder = tmp_path_factory.mktemp("shape") / f"tiny{layers}x{heads}"
    config = LlamaConfig(
        vocab_size=64, hidden_size=32 * heads, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    spec = ModelSpec(folder.name, "", layers, heads, heads, 32, 4)
    scores = np.random.default_rng(3).random(shape).astype(np.float32)
    HeadProfile(spec, scores, "random").save(folder / "p.rlkv.json")
    model, pool = TinyModel(folder, folder / "p.rlkv.json"), 256 << 20

    def task():
        llm = engine(model, sparsity, max_model_len=4096, kv_cache_memory_bytes=pool)
        cache = llm.llm_engine.vllm_config.cache_config
        return cache.kv_cache_max_concurrency, cache.kv_cache_size_tokens

    concurrency, tokens = in_child(task)
    profile = HeadProfile.load(model.profile)
    row = plan_rows(spec, Pool(pool, 4096), (sparsity,), profile=profile)[0]
    assert row["max_requests"] == pytest.approx(concurrency, rel=0.02)
    assert row["max_tokens"] == pytest.approx(tokens, rel=0.02)


def test_another_profile_under_the_same_name_is_not_served_from_the_compile_cache(
    tiny_models, tmp_path
):
    from rlkv.core.head_profile import HeadProfile
    from tests.vllm.test_parity import differences

    model, requests = tiny_models["llama"], prompts((40, 300, 900))
    first = HeadProfile.load(model.profile)
    path = tmp_path / "changing.rlkv.json"
    for scores in (first.scores, 1.0 - first.scores):
        HeadProfile(first.spec, scores, "random").save(path)
        changed = TinyModel(model.folder, path)
        completions = in_child(
            lambda model=changed: greedy(engine(model, 0.5, enforce_eager=False), requests, 24)
        )
        assert not differences(model, changed.full(0.5), requests, completions)
