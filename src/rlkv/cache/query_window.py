"""QueryWindowLayer: an evicting layer that scores tokens by the row's last queries.

R-KV and SnapKV ask what the last few queries attend to. Those queries are kept as they were used,
with their true positions, and their bytes count in the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkv.cache.evicting import EvictingLayer
from rlkv.cache.layer import tensor_bytes
from rlkv.core.slot_plan import SlotPlan


@dataclass(slots=True)
class QueryWindow:
    """The last queries of each row."""

    queries: Tensor
    """(batch, query_heads, window, head_dim), the newest last."""
    is_valid: Tensor
    """(batch, window) bool: False where a row has fewer queries."""
    scale: float
    """Factor on the scores."""

    def scores(self, keys: Tensor) -> Tensor:
        """(batch, heads, group_size, window, tokens) float32 attention scores before softmax."""
        rows, heads = keys.shape[:2]
        window, head_dim = self.queries.shape[2:]
        flat = self.queries.reshape(rows, heads, -1, head_dim)
        found = torch.matmul(flat, keys.transpose(-1, -2)).float() * self.scale
        return found.view(rows, heads, -1, window, keys.shape[2])

    def mean(self, weights: Tensor) -> Tensor:
        """Mean over each row's valid queries: (batch, heads, window, tokens) to (.., tokens)."""
        valid = self.is_valid[:, None, :, None].to(weights.dtype)
        return (weights * valid).sum(dim=2) / valid.sum(dim=2)


class QueryWindowLayer(EvictingLayer):
    """An evicting layer with the last queries at hand.

    Args:
        plan: Slots at every length; ``plan.queries`` is the number of queries kept between passes.
        prefill_queries: Queries to score with at the end of a pass over several tokens, where
            they cost nothing.
    """

    keeps_order = True

    def __init__(self, plan: SlotPlan, prefill_queries: int = 0) -> None:
        super().__init__(plan)
        self.prefill_queries = max(prefill_queries, plan.queries)
        self.queries: Tensor | None = None  # (batch, query_heads, held, head_dim)
        self._window: QueryWindow | None = None

    @property
    def width(self) -> int:
        """Queries that the current pass scores with, where a row has as many."""
        return self.prefill_queries if self.step.new > 1 else self.plan.queries

    @property
    def window(self) -> QueryWindow:
        """The queries to score with, during :meth:`finish`."""
        assert self._window is not None
        return self._window

    def finish(self, queries: Tensor, scale: float) -> None:
        """Scores with the last queries, the pass's own included, and keeps those."""
        lengths, new = self.lengths(), self.step.new
        if max(lengths) <= self.plan.whole_until:
            super().finish(queries, scale)
            return
        width = self.width
        recent = queries[:, :, -width:]
        if self.queries is not None:
            recent = torch.cat([self.queries, recent], 2)[:, :, -width:]
        valid = [self.plan.queries_held(n - new) + min(new, n) for n in lengths]
        count = torch.tensor(valid, device=queries.device)[:, None]
        age = torch.arange(recent.shape[2] - 1, -1, -1, device=queries.device)[None]
        self._window = QueryWindow(recent, age < count, scale)
        super().finish(queries, scale)
        self._window = None
        held = max(self.plan.queries_held(n) for n in lengths)
        self.queries = recent[:, :, -held:].clone()

    def nbytes(self) -> int:
        """See :meth:`CacheLayer.nbytes`."""
        return super().nbytes() + tensor_bytes(self.queries)

    def select_rows(self, rows: Tensor) -> None:
        """See :meth:`CacheLayer.select_rows`."""
        super().select_rows(rows)
        if self.queries is not None:
            self.queries = self.queries.index_select(0, rows.to(self.queries.device))

    def reset(self) -> None:
        """See :meth:`CacheLayer.reset`."""
        super().reset()
        self.queries = self._window = None
