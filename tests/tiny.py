"""Tiny random models of real architectures, and a dense reference run through them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rlkv.attention.reference import reference_attention
from rlkv.hf.compat import cache_argument

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
SINK, RECENT = 4, 12

_CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
}


def tiny_model(
    architecture: str, *, layers: int = 3, kv_heads: int = 4, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """A random float32 model of ``layers`` layers, 8 query heads and ``kv_heads`` KV heads."""
    settings: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 96,
        "pad_token_id": 0,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    config = _CONFIGS[architecture](**{**settings, **overrides})
    config.name_or_path = f"tiny-{architecture}"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # larger weights make attention selective, so that a wrong mask shows
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(6.0)
    return model.eval().requires_grad_(False)


def holding(model: PreTrainedModel, cache: object) -> dict[str, object]:
    """The forward or generate argument that passes ``cache``, whatever this version calls it."""
    return {cache_argument(model): cache}


def random_tokens(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """(rows, columns) token ids, without pad and end tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 96, (rows, columns), generator=generator)


def reference_logits(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    alpha: torch.Tensor,
    *,
    first_real: list[int] | None = None,
    sink: int = SINK,
    recent: int = RECENT,
) -> torch.Tensor:
    """Logits of every column with attention computed by the dense reference, no cache.

    The stock model runs with an attention function that calls the reference head by head.
    """
    from transformers import AttentionInterface

    starts = first_real or [0] * tokens.shape[0]

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        out = reference_attention(
            query,
            key,
            value,
            alpha[module.layer_idx],
            first_real=starts,
            sink=sink,
            recent=recent,
            scale=scaling,
        )
        return out.transpose(1, 2).contiguous().to(query.dtype), None

    AttentionInterface.register("dense_reference", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "dense_reference"
    try:
        columns = torch.arange(tokens.shape[1])[None]
        positions = (columns - torch.tensor(starts)[:, None]).clamp(min=0)
        with torch.no_grad():
            return model(tokens, position_ids=positions, use_cache=False).logits
    finally:
        model.config._attn_implementation = before
