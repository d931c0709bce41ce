"""Choosing the next token, reproducibly: a draw depends on (seed, prompt key, sample) alone."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from rlkv.core.engine import SamplingParams


def row_generator(seed: int, key: str, sample: int) -> random.Random:
    """The random source of one completion; the same wherever and beside whatever it runs."""
    return random.Random(f"{seed}/{key}/{sample}")


def next_tokens(logits: Tensor, params: SamplingParams, sources: list[random.Random]) -> Tensor:
    """One token per row.

    Args:
        logits: (batch, vocab).
        params: Temperature, top-p, top-k.
        sources: One random source per row; each draws once unless decoding is greedy.

    Returns:
        (batch,) int64.
    """
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    probs = filtered_probs(logits, params)
    # inverse of the cumulative distribution at one uniform number per row
    uniform = torch.tensor([source.random() for source in sources], dtype=torch.float64)
    cumulative = probs.double().cumsum(dim=-1)
    threshold = uniform.to(probs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=probs.shape[1] - 1)


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """(batch, vocab) float32 probabilities after temperature, top-k and top-p."""
    logits = logits.float() / params.temperature
    if params.top_k:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(dim=-1)
    if params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        # a token stays while the mass before it is under top_p: the first always does
        dropped = ordered.cumsum(dim=-1) - ordered >= params.top_p
        probs = probs.masked_fill(dropped.scatter(-1, order, dropped), 0.0)
    return probs
