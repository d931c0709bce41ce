"""StreamingLLM: every head keeps the first sink and the last recent tokens only.

Deviation: positions stay absolute, as in RLKV's local branch; the original re-rotates keys by cache
slot. By default all heads are local and the sparsity plays no part. With
``streaming_recent="proportional"`` the recent window grows until all heads together hold the bytes
of the head split; a prompt's own pass then sees all of the prompt, as with other evicting methods.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkv.cache.evicting import POSITION_BYTES, Choice, EvictingLayer, Tokens
from rlkv.cache.layer import CacheLayer
from rlkv.core.slot_plan import SlotPlan
from rlkv.methods.base import HeadSplitMethod


class StreamingLayer(EvictingLayer):
    """Sink tokens and as many recent ones as the plan allows."""

    def __init__(self, plan: SlotPlan) -> None:
        super().__init__(plan)
        self.sink = plan.budget.sink

    def rank(self, tokens: Tokens, choice: Choice) -> Tensor:
        """Sink tokens first, then the newest."""
        newest = tokens.positions.expand(tokens.keys.shape[:3]).float()
        return newest.masked_fill(tokens.positions < self.sink, torch.inf)


class StreamingLLM(HeadSplitMethod):
    """All heads local: the floor that head selection must beat."""

    name = "streaming_llm"
    paper = "arXiv:2309.17453"

    @property
    def _is_proportional(self) -> bool:
        return self.options.streaming_recent == "proportional"

    @property
    def ignores_sparsity(self) -> bool:
        """True for the fixed window."""
        return not self._is_proportional

    @property
    def fixed_sparsity(self) -> float | None:
        """1, since every head is local; None for the proportional window."""
        return None if self._is_proportional else 1.0

    @property
    def chunk_exact(self) -> bool:
        """True for the fixed window."""
        return not self._is_proportional and super().chunk_exact

    def full_heads(self) -> NDArray[np.bool_]:
        """No head; all of them at sparsity 0 with the proportional window."""
        everything = self._is_proportional and self.budget.sparsity == 0.0
        return np.full(self.spec.shape, everything, dtype=np.bool_)

    def make_layer(self, layer: int) -> CacheLayer:
        """See :meth:`CacheMethod.make_layer`."""
        if not self._is_proportional or self.budget.sparsity == 0.0:
            return super().make_layer(layer)
        plan = SlotPlan(self.spec, self.budget, layer, slot_overhead=POSITION_BYTES)
        return StreamingLayer(plan)
