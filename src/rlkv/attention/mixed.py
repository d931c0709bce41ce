"""Mixed attention: alpha·full + (1 - alpha)·local per KV head (paper eq. 1), with a gradient.

Both branches share one score matrix: out = (alpha·P_full + (1 - alpha)·P_local) V. That is one
matrix product less than two attention calls, exact at alpha = 1, and differentiable in alpha.
Probabilities and gates are float32 whatever the model's dtype, since bf16 gates would lose steps.

No probability outlives the pass: the backward recomputes them from queries and keys, a few rows at
a time. So the memory of a training pass grows with the tokens, not with their square, and on a CPU
the working set stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 19}
"""Scores held at once by kind of device: on a CPU what its cache holds."""
_CHUNK_ELSEWHERE = 1 << 27
_LEAST_BLOCK = 128


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
    out = _MixedAttention.apply(queries, keys, values, alpha, full_bias, local_bias, scale)
    assert isinstance(out, Tensor)
    return out


def chunk_elements(device: torch.device) -> int:
    """Scores that attention holds at once on ``device``, in numbers."""
    return _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELSEWHERE)


def query_block(query_heads: int, tokens: int, device: torch.device) -> int:
    """Queries to attend with in one call, so that one row's scores are few enough to hold."""
    return max(_LEAST_BLOCK, chunk_elements(device) // (query_heads * tokens))


class _MixedAttention(torch.autograd.Function):
    """The function and its derivative, computed over chunks of batch rows."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's own context type is private
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        alpha: Tensor,
        full_bias: Tensor,
        local_bias: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, values, alpha, full_bias, local_bias)
        ctx.scale = scale
        batch, query_heads, num_queries, head_dim = queries.shape
        parts = []
        for rows in _chunks(queries, keys):
            p_full, p_local = _probabilities(queries, keys, full_bias, local_bias, scale, rows)
            a = _column(alpha, rows, keys.shape[1])
            probs = p_full.mul_(a).add_(p_local.mul_(1.0 - a)).to(values.dtype)
            flat = probs.view(*probs.shape[:2], -1, probs.shape[-1])
            parts.append(torch.matmul(flat, values[rows]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(batch, query_heads, num_queries, head_dim)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        queries, keys, values, alpha, full_bias, local_bias = ctx.saved_tensors
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        inputs = ctx.needs_input_grad[:3]
        d_queries, d_keys, d_values = (
            torch.empty_like(t) if needed else None
            for t, needed in zip((queries, keys, values), inputs, strict=True)
        )
        d_alpha = torch.zeros(queries.shape[0], kv_heads, dtype=torch.float32, device=grad.device)
        for rows in _chunks(queries, keys):
            p_full, p_local = _probabilities(queries, keys, full_bias, local_bias, ctx.scale, rows)
            a = _column(alpha, rows, kv_heads)
            g = grad[rows].reshape(len(p_full), kv_heads, -1, head_dim)
            d_probs = torch.matmul(g, values[rows].transpose(-1, -2)).float().view(p_full.shape)
            # the softmax derivative needs <dP, P> of each branch; their difference is d alpha
            full_dot = (d_probs * p_full).sum(dim=-1, keepdim=True)
            local_dot = (d_probs * p_local).sum(dim=-1, keepdim=True)
            d_alpha[rows] = (full_dot - local_dot).flatten(2).sum(dim=-1)
            weighted_full, weighted_local = p_full.mul_(a), p_local.mul_(1.0 - a)
            if d_values is not None:
                probs = (weighted_full + weighted_local).to(values.dtype)
                flat = probs.view(*probs.shape[:2], -1, probs.shape[-1])
                d_values[rows] = torch.matmul(flat.transpose(-1, -2), g)
            if d_queries is None and d_keys is None:
                continue
            d_scores = (d_probs - full_dot).mul_(weighted_full)
            d_scores.add_((d_probs - local_dot).mul_(weighted_local)).mul_(ctx.scale)
            flat = d_scores.to(queries.dtype).view(*d_scores.shape[:2], -1, d_scores.shape[-1])
            if d_queries is not None:
                d_queries[rows] = torch.matmul(flat, keys[rows]).view(queries[rows].shape)
            if d_keys is not None:
                q = queries[rows].reshape(*flat.shape[:3], head_dim)
                d_keys[rows] = torch.matmul(flat.transpose(-1, -2), q)
        d_gates = d_alpha if alpha.dim() == 2 and alpha.shape[0] > 1 else d_alpha.sum(0)
        return d_queries, d_keys, d_values, d_gates.view(alpha.shape), None, None, None


def _chunks(queries: Tensor, keys: Tensor) -> list[slice]:
    """Slices of batch rows whose scores are few enough to hold."""
    batch, query_heads, num_queries, _ = queries.shape
    step = max(1, chunk_elements(keys.device) // (query_heads * num_queries * keys.shape[2]))
    return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]


def _column(alpha: Tensor, rows: slice, kv_heads: int) -> Tensor:
    """Gates of some rows, (rows or 1, kv_heads, 1, 1, 1) float32."""
    per_row = alpha.dim() == 2 and alpha.shape[0] > 1
    return (alpha[rows] if per_row else alpha).float().view(-1, kv_heads, 1, 1, 1)


def _probabilities(
    queries: Tensor,
    keys: Tensor,
    full_bias: Tensor,
    local_bias: Tensor,
    scale: float,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Full and local probabilities, each (rows, kv_heads, group, queries, tokens) float32."""
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    num_rows, query_heads, num_queries, head_dim = queries[rows].shape
    # all queries of one kv head side by side: keys are never repeated
    q = queries[rows].reshape(num_rows, kv_heads, -1, head_dim)
    scores = torch.matmul(q, keys[rows].transpose(-1, -2)).float().mul_(scale)
    scores = scores.view(num_rows, kv_heads, query_heads // kv_heads, num_queries, tokens)
    # torch's fused softmax is faster than one shared exponential and its sums
    p_full = (scores + _of_rows(full_bias, rows)[:, :, None]).softmax(dim=-1)
    return p_full, scores.add_(_of_rows(local_bias, rows)[:, :, None]).softmax(dim=-1)


def _of_rows(bias: Tensor, rows: slice) -> Tensor:
    return bias if bias.shape[0] == 1 else bias[rows]
