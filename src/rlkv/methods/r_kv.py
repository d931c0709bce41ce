"""R-KV: keeps tokens that recent queries attend to and that are unlike other tokens.

Z = lambda·A - (1 - lambda)·R. A is the attention of the last eight queries (group maximum of the
scores, softmax, mean over queries, max-pooled over seven tokens); R is the softmax of a key's mean
cosine to all keys, where each key forgives its newest near-duplicate (cosine above 0.5).

Deviations: positions stay absolute; rows of a batch are scored apart. The budget is the head
split's bytes, query cache included, and a compression frees an eighth of it, so that it is never
exceeded; ``budget_mode="authors"`` keeps (1 - s)·n + window tokens less the query cache and grows
by 128 between compressions, ``"fixed"`` is the official absolute budget. All keys are scored, where
the RLKV baseline scores the last 512 only and so misses small budgets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlkv.cache.evicting import POSITION_BYTES, Choice, Tokens
from rlkv.cache.query_window import QueryWindow, QueryWindowLayer
from rlkv.core.slot_plan import SlotPlan
from rlkv.methods.base import EvictingMethod

_QUERIES = 8
_POOL = 7
_THRESHOLD = 0.5
_LAMBDA = 0.1  # the paper's; the authors' code has 0.07
_BLOCK = 512


class RKVLayer(QueryWindowLayer):
    """Important and unlike others, plus the last tokens."""

    def rank(self, tokens: Tokens, choice: Choice) -> Tensor:
        """Z for all but the last tokens, which are kept for certain."""
        kept = (choice.targets // 2).clamp(1, _QUERIES)
        is_last = tokens.positions >= choice.lengths - kept
        real = (tokens.positions >= 0).expand(tokens.keys.shape[:3])
        scored = real & ~is_last
        a = importance(self.window, tokens.keys, scored)
        r = redundancy(tokens.keys, real)
        return (_LAMBDA * a - (1.0 - _LAMBDA) * r).masked_fill(is_last, torch.inf)


class RKV(EvictingMethod):
    """Importance minus redundancy."""

    name = "r_kv"
    paper = "arXiv:2505.24133"
    slot_overhead = POSITION_BYTES
    queries = _QUERIES
    in_intervals = True

    def evicting_layer(self, plan: SlotPlan) -> RKVLayer:
        """See :meth:`EvictingMethod.evicting_layer`."""
        return RKVLayer(plan)


def importance(window: QueryWindow, keys: Tensor, scored: Tensor) -> Tensor:
    """A: attention of the last queries to the ``scored`` tokens.

    Args:
        window: The last queries.
        keys: (batch, heads, tokens, head_dim).
        scored: (batch, heads, tokens) bool; other tokens get no attention.

    Returns:
        (batch, heads, tokens) float32 in [0, 1].
    """
    logits = window.scores(keys).amax(dim=2)
    low = torch.finfo(logits.dtype).min
    attention = logits.masked_fill(~scored[:, :, None], low).softmax(dim=-1)
    mean = window.mean(attention).masked_fill(~scored, 0.0)
    return functional.max_pool1d(mean, _POOL, stride=1, padding=_POOL // 2)


def redundancy(keys: Tensor, real: Tensor) -> Tensor:
    """R: softmax over keys of their mean cosine to the other keys.

    Args:
        keys: (batch, heads, tokens, head_dim).
        real: (batch, heads, tokens) bool; False for padding and empty slots.

    Returns:
        (batch, heads, tokens) float32 that sums to 1 over real tokens.
    """
    unit = keys.float()
    unit = unit / (unit.norm(dim=-1, keepdim=True) + 1e-8)
    unit = unit.masked_fill(~real[..., None], 0.0)
    tokens = keys.shape[2]
    column = torch.arange(tokens, device=keys.device, dtype=torch.int32)
    first = real.to(torch.int8).argmax(dim=-1).to(torch.int32)[..., None, None]
    total = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    for start in range(0, tokens, _BLOCK):  # tokens x tokens is never held at once
        stop = min(start + _BLOCK, tokens)
        cosine = torch.matmul(unit[:, :, start:stop], unit.transpose(-1, -2))
        cosine.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
        # as in the authors' code, a key without near-duplicate forgives the first key
        newest = torch.where(cosine > _THRESHOLD, column, first).amax(dim=-1, keepdim=True)
        cosine.scatter_(3, newest.long(), 0.0)
        total += cosine.sum(dim=2)
    mean = total / real.sum(dim=-1, keepdim=True)
    return mean.masked_fill(~real, -torch.inf).softmax(dim=-1)
