"""Bytes of a model's weights, from its config alone."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from rlkv.hf.loading import model_config


def weight_bytes(name: str, revision: str | None = None) -> int:
    """Bytes of the weights in the type they were saved in; none of them is read.

    Args:
        name: ``embedded``, ``smollm2``, a local folder, or a hub id.
        revision: Commit, tag or branch on the hub.

    Raises:
        ModelError: The config cannot be read.
    """
    config = model_config(name, revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return numbers * dtype.itemsize
