"""SnapKV: keeps the prompt tokens that the prompt's last queries attend to.

The last 64 queries of the prompt attend to it; their mean attention, pooled over five tokens and
averaged over the query heads of a KV head, ranks all tokens but the last 64, which are kept.

Generated tokens: the paper keeps them all, which no budget survives in a long chain of thought.
Here the same rule is applied again whenever the budget is full, with the last eight queries (cached
with their true positions, and counted), to prompt and generated tokens alike. A window is never
more than half of what is kept. ``budget_mode`` "authors" and "fixed" as in :mod:`r_kv`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlkv.attention.masks import visible
from rlkv.cache.evicting import POSITION_BYTES, Choice, Tokens
from rlkv.cache.query_window import QueryWindowLayer
from rlkv.core.slot_plan import SlotPlan
from rlkv.methods.base import EvictingMethod

_PREFILL_QUERIES = 64
_QUERIES = 8
_POOL = 5


class SnapKVLayer(QueryWindowLayer):
    """What the last queries attend to, plus the last tokens."""

    def rank(self, tokens: Tokens, choice: Choice) -> Tensor:
        """Pooled attention of the window for all tokens before it."""
        window = self.window
        size = window.queries.shape[2]
        kept = (choice.targets // 2).clamp(1, self.width)
        is_last = tokens.positions >= choice.lengths - kept
        # queries older than the kept tokens would look at a shorter past
        age = torch.arange(size - 1, -1, -1, device=tokens.keys.device)[None]
        window.is_valid = window.is_valid & (age < kept[:, 0])
        asked = choice.lengths[:, 0] - 1 - age
        mask = visible(asked, tokens.positions)[:, :, None]
        logits = window.scores(tokens.keys)
        low = torch.finfo(logits.dtype).min
        attention = logits.masked_fill(~mask, low).softmax(dim=-1).mean(dim=2)
        before = (tokens.positions >= 0) & ~is_last
        mean = window.mean(attention).masked_fill(~before, 0.0)
        # neighbours of one strong token differ by little: float32 sums would order them by chance
        pooled = functional.avg_pool1d(mean.double(), _POOL, stride=1, padding=_POOL // 2)
        return pooled.masked_fill(is_last, torch.inf)


class SnapKV(EvictingMethod):
    """Attention of the last queries, at the prompt's end and whenever the budget is full."""

    name = "snapkv"
    paper = "arXiv:2404.14469"
    slot_overhead = POSITION_BYTES
    queries = _QUERIES
    in_intervals = True

    def evicting_layer(self, plan: SlotPlan) -> SnapKVLayer:
        """See :meth:`EvictingMethod.evicting_layer`."""
        return SnapKVLayer(plan, _PREFILL_QUERIES)
