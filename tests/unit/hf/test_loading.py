"""Shapes from configs alone, refusals before weights load, and a loaded model's state."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rlkv.errors import ConfigError, ModelError, UnsupportedModelError
from rlkv.hf.loading import load_model, model_spec, spec_from_config
from rlkv.hf.support import require_supported

# Typed by hand from the models' published configs.
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    dtype="bfloat16",
)
QWEN2_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    dtype="bfloat16",
)
QWEN3_4B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("config", "shape", "query_heads"),
    [(LLAMA_8B, (32, 8), 32), (QWEN2_7B, (28, 4), 28), (QWEN3_4B, (36, 8), 32)],
    ids=["llama-3.1-8b", "qwen2.5-7b", "qwen3-4b"],
)
def test_shape_of_published_models(config, shape, query_heads):
    require_supported(config, "m")
    spec = spec_from_config(config, "m", "abc")
    assert (spec.shape, spec.num_query_heads, spec.head_dim) == (shape, query_heads, 128)
    assert (spec.dtype_bytes, spec.revision) == (2, "abc")


def test_shape_equals_the_projections_of_a_model_without_memory():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(QWEN3_4B)
    attention = model.model.layers[0].self_attn
    spec = spec_from_config(QWEN3_4B, "m")
    assert attention.k_proj.out_features == spec.num_kv_heads * spec.head_dim
    assert attention.q_proj.out_features == spec.num_query_heads * spec.head_dim


def test_dtype_argument_overrides_the_configs():
    assert spec_from_config(QWEN3_4B, "m", dtype="float32").dtype_bytes == 4


def config_of(model_type: str, **changes):
    return AutoConfig.for_model(model_type, **changes)


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (config_of("gemma3_text", num_hidden_layers=12), (5, 11)),
        (config_of("qwen3_next", num_hidden_layers=8), (3, 7)),
        (config_of("olmo3", num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL]), (0, 2)),
        (config_of("jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1), (1, 3)),
        (
            config_of(
                "qwen2",
                num_hidden_layers=4,
                use_sliding_window=True,
                sliding_window=32,
                max_window_layers=2,
            ),
            (0, 1),
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_hybrid_models_count_only_their_full_attention_layers(config, layers):
    require_supported(config, "m")
    spec = spec_from_config(config, "m")
    assert (spec.layer_indices, spec.num_layers) == (layers, len(layers))


def test_a_composite_config_is_read_through_its_text_part():
    config = config_of("gemma3", text_config={"num_hidden_layers": 6, "num_key_value_heads": 2})
    assert spec_from_config(config, "m").shape == (1, 2)


REFUSED = [
    ("mistral", {"sliding_window": 4096}, "sliding window of 4096 tokens"),
    ("phi3", {"sliding_window": 2047}, "sliding window of 2047 tokens"),
    ("ministral", {}, "no layer is of type full_attention, only sliding_attention"),
    ("mamba", {}, "only linear_attention"),
    ("falcon_h1", {}, "only hybrid"),
    ("gpt_oss", {}, "learned attention sinks"),
    ("mimo_v2_flash", {}, "learned attention sinks"),
    ("gemma2", {}, "attn_logit_softcapping 50.0"),
    ("t5", {}, "encoder-decoder"),
    ("bart", {}, "encoder-decoder"),
    ("deepseek_v2", {}, "multi-head latent attention"),
    ("deepseek_v3", {}, "multi-head latent attention"),
    ("minicpm3", {}, "multi-head latent attention"),
    ("bloom", {}, "ALiBi"),
    ("mpt", {}, "ALiBi"),
    ("falcon", {}, "does not go through the attention interface"),
    ("gpt_neo", {}, "does not go through the attention interface"),
    ("gpt2", {}, "changes keys or values between cache and attention"),
    ("jetmoe", {}, "changes keys or values between cache and attention"),
    ("diffllama", {}, "changes keys or values between cache and attention"),
    ("gemma3n", {}, "reuse the keys and values"),
    ("gemma4", {}, "reuse the keys and values"),
    ("mllama", {}, "cross-attention"),
    ("bert", {}, "encoder, whose attention also looks ahead"),
    ("hrm_text", {}, "several times per token"),
    ("vit", {}, "does not go through the attention interface"),
]
# A version older than a model cannot name it; the others are still checked there.
KNOWN = [case for case in REFUSED if case[0] in AutoConfig.for_model.__globals__["CONFIG_MAPPING"]]


@pytest.mark.parametrize(("model_type", "changes", "reason"), KNOWN, ids=[k[0] for k in KNOWN])
def test_attention_that_cannot_be_split_is_refused_by_name_and_reason(model_type, changes, reason):
    with pytest.raises(UnsupportedModelError) as caught:
        require_supported(config_of(model_type, **changes), "org/Some-Model")
    message = str(caught.value)
    assert message.startswith(f"org/Some-Model ({model_type}) cannot be compressed by kv head")
    assert reason in message
    assert "choose such a model" in message


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mistral", {"sliding_window": None}), ("phi3", {}), ("llama", {}), ("stablelm", {})],
)
def test_plain_causal_attention_is_accepted(model_type, changes):
    require_supported(config_of(model_type, **changes), "m")


@pytest.fixture
def saved(tmp_path):
    """Folder of a two-layer Llama in bfloat16 with a word tokenizer that has no pad token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_loaded_model_is_frozen_and_its_tokenizer_pads_left(saved):
    loaded = load_model(str(saved))
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.tokenizer.padding_side, loaded.tokenizer.pad_token) == ("left", "<end>")
    assert loaded.spec == model_spec(str(saved))
    assert (loaded.spec.model_id, loaded.spec.dtype_bytes) == (saved.name, 2)


def test_dtype_decides_weights_and_spec(saved):
    loaded = load_model(str(saved), dtype="float32")
    assert (loaded.model.dtype, loaded.spec.dtype_bytes) == (torch.float32, 4)


def test_an_unsupported_model_is_refused_although_its_weights_are_missing(tmp_path):
    config_of("mistral", sliding_window=128).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sliding window of 128"):
        load_model(str(tmp_path))


def test_missing_weights_and_a_broken_config_are_one_sentence(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot read model .* copy or fetch it again"):
        load_model(str(saved))
    (saved / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read model"):
        load_model(str(saved))


def test_a_truncated_weight_file_is_one_sentence(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot read model"):
        load_model(str(saved))


def test_a_hub_id_without_network_is_one_sentence():
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE, or pass a local folder"):
        load_model("no-such-org/No-Model")


@pytest.mark.parametrize("setting", [{"dtype": "int3"}, {"device": "warp"}])
def test_a_wrong_setting_is_refused_before_the_model_is_read(setting):
    with pytest.raises(ConfigError, match="use"):
        load_model("no-such-org/No-Model", **setting)
