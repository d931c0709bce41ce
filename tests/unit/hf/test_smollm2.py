"""The parity claims on a real language model and real text (Done once per machine: rlkv fetch)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkv.core.files import read_jsonl
from rlkv.core.head_profile import HeadProfile
from rlkv.errors import RLKVError
from rlkv.gates import Gates
from rlkv.hf.attach import attach_gates, compress
from rlkv.hf.engine import left_padded
from rlkv.hf.loading import load_model
from tests.tiny import holding

pytestmark = pytest.mark.slow
# float32 logits of a 30-layer model reach 30: 1e-5 relative to that
TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def loaded():
    try:
        return load_model("smollm2", dtype="float32")
    except RLKVError as error:
        pytest.skip(f"SmolLM2 is not on this machine: {error}")


@pytest.fixture(scope="module")
def tokens(loaded, shared_data):
    rows = list(read_jsonl(shared_data / "gsm8k_test.jsonl"))[:3]
    text = "\n\n".join(row["question"] + "\n" + row["solution"] for row in rows)
    ids = loaded.tokenizer(text)["input_ids"][:300]
    assert len(ids) == 300
    return torch.tensor([ids])


def half_profile(spec) -> HeadProfile:
    scores = np.random.default_rng(0).random(spec.shape, dtype=np.float32)
    return HeadProfile(spec, scores, "random")


def test_gates_of_one_equal_the_stock_model(loaded, tokens):
    with torch.inference_mode():
        stock = loaded.model(tokens).logits
        with attach_gates(loaded.model, Gates(loaded.spec.shape), spec=loaded.spec):
            gated = loaded.model(tokens).logits
    assert (gated - stock).abs().max() < TOLERANCE


def test_split_cache_equals_masked_dense_on_real_text(loaded, tokens):
    profile = half_profile(loaded.spec)
    gates = Gates.binary(torch.from_numpy(profile.full_heads(0.5).copy()))
    with torch.inference_mode():
        with attach_gates(loaded.model, gates, spec=loaded.spec):
            dense = loaded.model(tokens, use_cache=False).logits
        with compress(loaded.model, profile=profile, spec=loaded.spec) as session:
            split = loaded.model(tokens, **holding(loaded.model, session.new_cache())).logits
    assert (split - dense).abs().max() < TOLERANCE


def test_greedy_ids_are_identical_over_200_tokens(loaded, tokens):
    profile = half_profile(loaded.spec)
    gates = Gates.binary(torch.from_numpy(profile.full_heads(0.5).copy()))
    batch, mask = left_padded([tokens[0, :120].tolist(), tokens[0, 100:150].tolist()], 0)
    options = {"attention_mask": mask, "max_new_tokens": 200, "min_new_tokens": 200}
    with attach_gates(loaded.model, gates, spec=loaded.spec):
        dense = loaded.model.generate(batch, do_sample=False, **options)
    with compress(loaded.model, profile=profile, spec=loaded.spec):
        split = loaded.model.generate(batch, do_sample=False, **options)
    assert split.shape[1] == 320
    assert torch.equal(dense, split)


def test_stock_greedy_equals_gates_of_one_over_200_tokens(loaded, tokens):
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    prompt = tokens[:, :100]
    stock = loaded.model.generate(prompt, **options)
    with compress(loaded.model, method="full", spec=loaded.spec):
        assert torch.equal(loaded.model.generate(prompt, **options), stock)
