"""Which models can be compressed by KV head, decided from the config before weights load.

The split needs two things of a model's attention: it goes through the interface of transformers
that lets another attention function take part, and it hands that function the keys and values
exactly as the cache returned them. Beyond that, each query's weights must come from plain causal
softmax over the kept tokens.

The tables were made by reading every ``update(…)`` call of the causal language models in
transformers 5.24 and what happens to its result. 87 accepted types were then run on tiny random
weights: the attention function received the very tensors that the cache returned, in the layers and
shapes that the config tells.
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from rlkv.errors import UnsupportedModelError

FULL_ATTENTION = "full_attention"

_REFUSED: dict[str, tuple[str, ...]] = {
    "it adds learned attention sinks to the softmax": (
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "flint",
        "mimo_v2_flash",
    ),
    "some of its layers reuse the keys and values of another layer": (
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_assistant",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "gemma4_unified_text",
    ),
    "it changes keys or values between cache and attention": (
        "gpt2",
        "gpt-sw3",
        "diffllama",
        "doge",
        "jetmoe",
    ),
    "it selects keys by an indexer of its own": (
        "deepseek_v4",
        "dots3_note",
        "dots3_note_text",
        "minimax_m3_vl_text",
    ),
    "its cross-attention layers keep image keys in the same cache": ("mllama",),
    "it runs its layers several times per token": ("dory", "hrm_text"),
    "it adds position biases (ALiBi) to attention scores": ("bloom", "mpt"),
    "it is an encoder, whose attention also looks ahead": (
        "bert",
        "bert-generation",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
}
"""Reasons with the model types that pass the general checks and still cannot be split."""

_FLAG_UNDERSTATES = frozenset(
    {
        "bamba",
        "jamba",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "stablelm",
    }
)
"""Model types that do not announce the attention interface, though their attention uses it."""


def require_supported(config: PreTrainedConfig, model_id: str) -> None:
    """Checks that the model's attention can be split by KV head.

    Hybrid models pass if they have ``full_attention`` layers; the other layers stay untouched.

    Raises:
        UnsupportedModelError: It cannot; the message says why.
    """
    reason = _reason_against(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model_id} ({config.model_type}) cannot be compressed by kv head: {reason}; expected "
            "a decoder with plain causal attention such as Llama, Qwen2 or Qwen3, so choose such a "
            "model (docs/models.md lists them)"
        )


def full_attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers whose KV cache grows with the sequence; ``config`` is the text part."""
    count = config.num_hidden_layers
    types = config_value(config, "layer_types")
    if types is None:
        return () if _sliding_window(config) else tuple(range(count))
    return tuple(index for index, kind in enumerate(types[:count]) if kind == FULL_ATTENTION)


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """An attribute of a config, or None where this architecture has none of that name.

    Raises:
        UnsupportedModelError: Its value differs between layers.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # how transformers answers for heterogeneous layers
        raise UnsupportedModelError(
            f"{config.model_type} has layers that differ in {name}, expected one value for all; "
            "choose another model"
        ) from error


def _reason_against(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    text = config.get_text_config(decoder=True)
    for reason, model_types in _REFUSED.items():
        if config.model_type in model_types or text.model_type in model_types:
            return reason
    if config_value(text, "kv_lora_rank"):
        return "its cache holds latent vectors shared by all heads (multi-head latent attention)"
    if softcap := config_value(text, "attn_logit_softcapping"):
        return f"it caps attention scores (attn_logit_softcapping {softcap})"
    if config_value(text, "alibi"):
        return "it adds position biases (ALiBi) to attention scores"
    if config_value(text, "v_head_dim") not in (None, config_value(text, "head_dim")):
        return f"its values are {text.v_head_dim} wide and its keys {text.head_dim}"
    if not full_attention_layers(text):
        types = config_value(text, "layer_types")
        if types is None:
            window = _sliding_window(text)
            return f"every layer has a sliding window of {window} tokens, so no cache grows"
        return f"no layer is of type {FULL_ATTENTION}, only {', '.join(sorted(set(types)))}"
    if not _goes_through_interface(config):
        return "its attention does not go through the attention interface of transformers"
    return None


def _sliding_window(config: PreTrainedConfig) -> int | None:
    """The window that all layers share, in a config without ``layer_types``."""
    if config_value(config, "use_sliding_window") is False:
        return None
    return config_value(config, "sliding_window") or None


def _goes_through_interface(config: PreTrainedConfig) -> bool:
    if config.model_type in _FLAG_UNDERSTATES:
        return True
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        # code shipped with the weights: its class is checked once it is known, after loading
        return bool(getattr(config, "auto_map", None))
    classes = model_class if isinstance(model_class, tuple) else (model_class,)
    return all(one._supports_attention_backend for one in classes)
