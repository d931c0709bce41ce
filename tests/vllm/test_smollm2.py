"""A real model in bfloat16: every token is the reference's choice, or as good as a tie.

`RLKV_PARITY_REQUESTS` sets how many requests are checked (16; the published figure used 200).
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.vllm.conftest import TinyModel, engine, greedy, in_child

pytestmark = pytest.mark.vllm
NEAR_TIE = 0.5
"""Logits apart: bfloat16 resolves 0.125 at the size of these logits, and rounding adds up."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> TinyModel:
    from rlkv.core.head_profile import HeadProfile
    from rlkv.core.model_spec import ModelSpec
    from rlkv.hf.sources import SMOLLM2_ID, smollm2_folder

    folder = smollm2_folder()
    if not (folder / "config.json").is_file():
        pytest.skip("SmolLM2 is not fetched; run `rlkv fetch smollm2`")
    scores = np.random.default_rng(0).random((30, 3)).astype(np.float32)
    path = tmp_path_factory.mktemp("smollm2") / "p.rlkv.json"
    HeadProfile(ModelSpec(SMOLLM2_ID, "", 30, 3, 9, 64, 2), scores, "random").save(path)
    return TinyModel(folder, path)


def questions(shared_data, folder, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = (shared_data / "gsm8k_test.jsonl").read_text("utf-8").split("\n")[: 3 * count]
    found = []
    for start in range(0, 3 * count, 3):
        # three questions a request: long enough for the window to matter
        text = "\n\n".join(json.loads(row)["question"] for row in rows[start : start + 3])
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        found.append(list(encoded["input_ids"]))
    return found


def test_no_request_differs_by_more_than_near_ties(smollm2, shared_data, record_property):
    count = int(os.environ.get("RLKV_PARITY_REQUESTS", "16"))

    def generate():
        requests = questions(shared_data, smollm2.folder, count)
        llm = engine(smollm2, 0.5, dtype="bfloat16", kv_cache_memory_bytes=256 << 20)
        return requests, greedy(llm, requests, 64)

    requests, completions = in_child(generate)

    def gaps(sink, recent, amount):
        import torch

        from tests.vllm.masked_reference import load_reference

        torch.set_num_threads(1)
        full = smollm2.full(0.5)
        reference = load_reference(smollm2.folder, full, sink, recent)
        found = []
        for prompt, tokens in list(zip(requests, completions, strict=True))[:amount]:
            logits = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            found.append((logits.max(1).values - chosen).tolist())
        return found

    found = in_child(lambda: gaps(16, 64, count))
    worst = max(max(row) for row in found)
    differing = sum(any(gap > 0 for gap in row) for row in found)
    record_property("requests", count)
    record_property("requests_with_another_token", differing)
    record_property("worst_gap", worst)
    print(f"{count} requests: {differing} with another token, worst gap {worst:.4f}")  # noqa: T201
    assert worst <= NEAR_TIE
    # the test can fail: with another window the same tokens are far from ties
    control = in_child(lambda: gaps(16, 56, 4))
    assert max(max(row) for row in control) > NEAR_TIE
