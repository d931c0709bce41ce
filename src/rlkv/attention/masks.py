"""The one mask of this project: causal, and sink + recent where a head is local.

Query q sees key k where k <= q and (k < sink or q - k < recent), with positions counted from the
row's first real token. Training, rollout, evaluation and serving all use this rule.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    sink: int | None = None,
    recent: int | None = None,
) -> Tensor:
    """Which keys each query may attend to.

    Args:
        query_positions: (batch, queries) int64; negative for padding.
        key_positions: (batch, tokens) or (batch, heads, tokens) int64; negative for an empty slot.
        sink: First tokens that a local head keeps, in tokens; None for a full head.
        recent: Last tokens that a local head keeps, in tokens; None for a full head.

    Returns:
        (batch, 1 or heads, queries, tokens) bool. A padding query sees every slot, so that its
        softmax is defined; nothing reads its output.
    """
    keys = key_positions if key_positions.dim() == 3 else key_positions[:, None]
    keys = keys[:, :, None, :]
    queries = query_positions[:, None, :, None]
    allowed = (keys >= 0) & (keys <= queries)
    if sink is not None and recent is not None:
        allowed &= (keys < sink) | (queries - keys < recent)
    return allowed | (queries < 0)


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """0 where ``mask`` is True, the lowest finite number elsewhere; same shape, ``dtype``."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)
