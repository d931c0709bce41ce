"""The oracle: a Hugging Face model with a dense mask per head, all keys kept, in float32.

Written for clarity and independent of the plugin: no cache, no blocks, no reordering of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

NAME = "rlkv_masked_reference"


@dataclass(frozen=True)
class Masked:
    """A model and the heads that see sink and recent tokens only."""

    model: torch.nn.Module
    full: torch.Tensor
    sink: int
    recent: int

    def logits(self, ids: list[int]) -> torch.Tensor:
        """(tokens, vocabulary) float32."""
        for layer, block in enumerate(self.model.model.layers):
            block.self_attn.rlkv_mask = self._visible(layer, len(ids))
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].float()

    def _visible(self, layer: int, tokens: int) -> torch.Tensor:
        """(kv_heads, queries, keys) bool."""
        query = torch.arange(tokens)[:, None]
        key = torch.arange(tokens)[None, :]
        causal = key <= query
        window = causal & ((key < self.sink) | (query - key < self.recent))
        return torch.where(self.full[layer][:, None, None], causal, window)


def _attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).float() for x in (key, value))
    visible = module.rlkv_mask.repeat_interleave(group, 0)[None]
    scores = (query.float() @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
    found = torch.softmax(scores, -1) @ value
    return found.transpose(1, 2).contiguous().to(query.dtype), None


def load_reference(folder, full: np.ndarray, sink: int, recent: int) -> Masked:
    """The model in ``folder`` with heads outside ``full`` (layers, kv_heads) windowed."""
    AttentionInterface.register(NAME, _attend)
    # without an entry of its own the name would get no padding mask; there is no padding here
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=NAME
    )
    return Masked(model.eval(), torch.from_numpy(np.array(full)), sink, recent)


@dataclass(frozen=True)
class Agreement:
    """How the tokens of one request compare with the reference's greedy choice."""

    first_difference: int | None
    """Index of the first new token that the reference would not have chosen."""
    margin: float
    """Smallest gap between the reference's two best logits up to there."""


def compare(reference: Masked, prompt: list[int], completion: list[int]) -> Agreement:
    """Checks a greedy completion token by token; equality everywhere is equality of sequences."""
    logits = reference.logits(prompt + completion)[len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    different = (best.indices[:, 0] != torch.tensor(completion)).nonzero().flatten()
    first = int(different[0]) if len(different) else None
    margins = (best.values[:, 0] - best.values[:, 1])[: None if first is None else first + 1]
    return Agreement(first, float(margins.min()))
