"""The published score files import onto the shapes of the models they were made for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlkv.core.import_scores import import_scores
from rlkv.hf.loading import spec_from_config
from tests.unit.hf.test_loading import LLAMA_8B
from tests.unit.hf.test_loading import QWEN2_7B as QWEN_7B

SPARSITIES = (0.2, 0.4, 0.5, 0.6, 0.8)


@pytest.mark.parametrize(
    ("file", "config", "empty_layers"),
    [
        ("rlkv-llama-3.1-8b-r1.adapter_weights.tsv", LLAMA_8B, [0, 0, 0, 1, 7]),
        # the published counts begin at s = .4
        ("rlkv-qwen-2.5-7b-r1.adapter_weights.tsv", QWEN_7B, [None, 2, 4, 6, 13]),
        ("duo-llama-3.1-8b-r1.full_attention_heads.tsv", LLAMA_8B, [None] * 5),
    ],
)
def test_published_scores_import_onto_their_model(shared_data, file, config, empty_layers):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    spec = spec_from_config(model.config, "published", dtype=torch.bfloat16)
    profile = import_scores(shared_data / "head_scores" / file, spec)
    assert profile.scores.shape == spec.shape
    assert profile.scores.min() >= 0.0
    assert profile.scores.max() <= 1.0
    for s, expected in zip(SPARSITIES, empty_layers, strict=True):
        exact = profile.full_heads(s)
        assert exact.sum() == round((1 - s) * spec.num_heads)
        by_quantile = profile.full_heads(s, "quantile")
        # the quantile keeps every head tied with the last; the published files hold many ties
        assert (by_quantile | ~exact).all()
        if expected is not None:
            assert int((by_quantile.sum(axis=1) == 0).sum()) == expected


def test_layers_without_full_heads_are_the_published_ones(shared_data):
    def empty(file, config, s):
        spec = spec_from_config(config, "published")
        full = import_scores(shared_data / "head_scores" / file, spec).full_heads(s, "quantile")
        return [layer for layer, row in enumerate(full) if not row.any()]

    assert empty("rlkv-llama-3.1-8b-r1.adapter_weights.tsv", LLAMA_8B, 0.6) == [3]
    assert empty("rlkv-qwen-2.5-7b-r1.adapter_weights.tsv", QWEN_7B, 0.4) == [0, 1]
