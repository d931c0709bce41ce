"""Shapes of the models that the paper trained, for planning where a hub cannot be reached.

Typed in from the models' published configs; parameter counts agree with the published ones. They
serve dry runs only: a run reads the config that comes with the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlkv.errors import ModelError
from rlkv.hf.loading import model_config

_SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        Qwen2Config,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen/Qwen3-4B-Thinking-2507": (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
}


def config_for_planning(name: str) -> tuple[PreTrainedConfig, bool]:
    """The config of a model, and whether it came with the model.

    Where it cannot be read and the paper trained this model, the published shape is returned.

    Raises:
        ModelError: The config cannot be read and no shape is known.
        UnknownNameError: ``name`` is no model name.
    """
    try:
        return model_config(name), True
    except ModelError:
        if name not in _SHAPES:
            raise
    kind, settings = _SHAPES[name]
    config = kind(**settings, dtype="bfloat16")
    config.name_or_path = name
    return config, False


def count_weights(config: PreTrainedConfig) -> tuple[int, bool]:
    """Weights of a model with this config, and whether it normalises queries and keys.

    None of the weights is made.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes.values()), any("q_norm" in name for name in sizes)
