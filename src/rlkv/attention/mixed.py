"""Mixed attention: alpha·full + (1 - alpha)·local per KV head (paper eq. 1), with a gradient.

Both branches share one score matrix: out = (alpha·P_full + (1 - alpha)·P_local) V. That is one
matrix product less than two attention calls, exact at alpha = 1, and differentiable in alpha.
Probabilities and gates are float32 whatever the model's dtype, since bf16 gates would lose steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixed_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    *,
    full_bias: Tensor,
    local_bias: Tensor,
    scale: float,
) -> Tensor:
    """alpha·full + (1 - alpha)·local for every query head.

    Args:
        queries: (batch, query_heads, queries, head_dim).
        keys: (batch, kv_heads, tokens, head_dim).
        values: (batch, kv_heads, tokens, head_dim).
        alpha: (kv_heads,) or (batch, kv_heads) float32 in [0, 1].
        full_bias: (batch or 1, 1, queries, tokens) float32, 0 where a full head may look, else very
            low.
        local_bias: Same for sink + recent.
        scale: Factor on the scores.

    Returns:
        (batch, query_heads, queries, head_dim) in the dtype of ``values``.
    """
    batch, query_heads, num_queries, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = query_heads // kv_heads
    # all queries of one kv head side by side: keys are never repeated
    q = queries.reshape(batch, kv_heads, group * num_queries, head_dim)
    scores = torch.matmul(q, keys.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, kv_heads, group, num_queries, -1)
    p_full = (scores + full_bias[:, :, None]).softmax(dim=-1)
    p_local = (scores + local_bias[:, :, None]).softmax(dim=-1)
    a = alpha.float().view(-1, kv_heads, 1, 1, 1)
    probs = (a * p_full + (1.0 - a) * p_local).to(values.dtype)
    out = torch.matmul(probs.view(batch, kv_heads, group * num_queries, -1), values)
    return out.view(batch, query_heads, num_queries, head_dim)
