"""Grouped attention: a layer hands out groups of KV heads, each with keys of its own length.

A group covers some heads and some queries of the pass. Long prefills come as several groups per
head set (query blocks), so that no mask grows with the square of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkv.attention.masks import additive

HeadIndex = slice | Tensor
"""Heads along a head axis: a slice (a view) where they are contiguous, else an int64 index."""


@dataclass(slots=True)
class HeadGroup:
    """Some KV heads with the keys that some queries of this pass attend to."""

    query_heads: HeadIndex
    """Query heads of this group, ``group_size`` per KV head, in order."""
    keys: Tensor
    """(batch, heads, tokens, head_dim)."""
    values: Tensor
    """(batch, heads, tokens, head_dim)."""
    mask: Tensor | None = None
    """(batch or 1, 1 or heads, queries, tokens) bool; None: every query sees every key."""
    causal: bool = False
    """Plain causal attention over as many keys as queries; excludes ``mask``."""
    start: int = 0
    """First query of the pass that this group serves."""
    stop: int | None = None
    """One past its last query; None: to the end."""


Observer = Callable[[HeadGroup, Tensor, Tensor], None]
"""Receives (group, queries, probs): probs (batch, heads, group_size, queries, tokens) float32."""


def grouped_attention(
    queries: Tensor, groups: Iterable[HeadGroup], *, scale: float, observe: Observer | None = None
) -> Tensor:
    """Attention of all query heads, group by group.

    Args:
        queries: (batch, query_heads, queries, head_dim).
        groups: Groups that together cover every head and query once.
        scale: Factor on the scores.
        observe: Called with each group's attention probabilities; forces the slow, explicit path.

    Returns:
        (batch, query_heads, queries, head_dim).
    """
    out: Tensor | None = None
    for group in groups:
        all_heads = isinstance(group.query_heads, slice) and group.query_heads == slice(None)
        everything = all_heads and group.start == 0 and group.stop is None
        q = queries if everything else queries[:, group.query_heads, group.start : group.stop]
        attended = _observed(q, group, scale, observe) if observe else attend(q, group, scale)
        if everything:
            return attended
        if out is None:
            out = torch.empty_like(queries)
        out[:, group.query_heads, group.start : group.stop] = attended
    if out is None:
        raise ValueError("a layer with a cache handed out no group of heads")
    return out


def attend(queries: Tensor, group: HeadGroup, scale: float) -> Tensor:
    """Attention of one group with the fused kernel; same shapes as :func:`grouped_attention`."""
    batch, query_heads, num_queries, head_dim = queries.shape
    kv_heads = group.keys.shape[1]
    size = query_heads // kv_heads
    if num_queries == 1:
        # the queries of one kv head become rows of one call: keys are read once, never repeated
        q = queries.reshape(batch, kv_heads, size, head_dim)
        out = scaled_dot_product_attention(
            q, group.keys, group.values, attn_mask=group.mask, scale=scale
        )
        return out.reshape(batch, query_heads, 1, head_dim)
    mask = group.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(size, dim=1)
    return scaled_dot_product_attention(
        queries,
        group.keys.repeat_interleave(size, dim=1) if size > 1 else group.keys,
        group.values.repeat_interleave(size, dim=1) if size > 1 else group.values,
        attn_mask=mask,
        is_causal=group.causal,
        scale=scale,
    )


def _observed(queries: Tensor, group: HeadGroup, scale: float, observe: Observer) -> Tensor:
    """The same attention computed step by step, handing its probabilities to ``observe``."""
    batch, query_heads, num_queries, head_dim = queries.shape
    kv_heads, tokens = group.keys.shape[1], group.keys.shape[2]
    size = query_heads // kv_heads
    q = queries.reshape(batch, kv_heads, size * num_queries, head_dim)
    scores = torch.matmul(q, group.keys.transpose(-1, -2)).float() * scale
    scores = scores.view(batch, kv_heads, size, num_queries, tokens)
    mask = group.mask
    if group.causal:
        mask = torch.ones(num_queries, tokens, dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is not None:
        scores = scores + additive(mask)[:, :, None]
    probs = scores.softmax(dim=-1)
    observe(group, queries, probs)
    flat = probs.to(group.values.dtype).view(batch, kv_heads, size * num_queries, tokens)
    out = torch.matmul(flat, group.values)
    return out.view(batch, query_heads, num_queries, head_dim)
