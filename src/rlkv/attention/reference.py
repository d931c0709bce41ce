"""Dense float32 attention, one head at a time: the oracle of every test.

Written to be read. alpha·full + (1 - alpha)·local is the paper's mixed attention (eq. 1); with
every alpha 0 or 1 it is what a split cache must compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.attention.masks import visible


def reference_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    *,
    first_real: list[int],
    sink: int,
    recent: int,
    scale: float,
) -> Tensor:
    """Mixed attention of the last ``queries`` columns over all columns.

    Args:
        queries: (batch, query_heads, queries, head_dim), the last columns of the sequence.
        keys: (batch, kv_heads, tokens, head_dim), all columns, after position encoding.
        values: (batch, kv_heads, tokens, head_dim).
        alpha: (kv_heads,) in [0, 1].
        first_real: Column of each row's first real token.
        sink: First tokens that the local branch sees.
        recent: Last tokens that the local branch sees.
        scale: Factor on the scores, usually head_dim ** -0.5.

    Returns:
        (batch, query_heads, queries, head_dim) float32. Rows of padding queries are meaningless.
    """
    batch, query_heads, num_queries, _ = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    group = query_heads // kv_heads
    out = torch.zeros(queries.shape, dtype=torch.float32)
    for row in range(batch):
        positions = torch.arange(tokens)[None] - first_real[row]
        query_positions = positions[:, tokens - num_queries :]
        full = visible(query_positions, positions)[0, 0]
        local = visible(query_positions, positions, sink=sink, recent=recent)[0, 0]
        for head in range(query_heads):
            kv_head = head // group
            q = queries[row, head].float()
            k, v = keys[row, kv_head].float(), values[row, kv_head].float()
            scores = (q @ k.T) * scale
            a = float(alpha[kv_head])
            out[row, head] = a * _softmax(scores, full) @ v + (1 - a) * _softmax(scores, local) @ v
    return out


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, torch.finfo(torch.float32).min).softmax(dim=-1)
