"""H2O: keeps the tokens with the most accumulated attention, and the most recent ones, half each.

Every token carries the attention it has received from all later queries, summed over the query
heads of its KV head. Prompts are summed in blocks of queries; nothing grows with their square.

Deviations: positions stay absolute (the authors' rotate by cache slot). The budget is the head
split's bytes, scores included, unless ``budget_mode`` says otherwise. Under that budget attention
paid while a row is still within sink + recent counts only where one pass goes beyond it: no score
is held there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.attention.grouped import HeadGroup
from rlkv.cache.evicting import POSITION_BYTES, SCORE_BYTES, Choice, EvictingLayer, Tokens
from rlkv.core.slot_plan import SlotPlan
from rlkv.methods.base import EvictingMethod


class H2OLayer(EvictingLayer):
    """Heavy hitters and recent tokens, half each."""

    keeps_scores = True
    needs_probs = True

    def observe(self, group: HeadGroup, queries: Tensor, probs: Tensor) -> None:
        """Adds each token's attention to its score."""
        step = self.step
        scores = self.scores if self._joined is None else self._joined.scores
        assert scores is not None
        if step.first_real is not None:  # padding asks about nothing
            stop = step.new if group.stop is None else group.stop
            asked = step.positions(step.past + group.start, step.past + stop) >= 0
            probs = probs * asked[:, None, None, :, None]
        scores[:, :, : probs.shape[-1]] += probs.sum(dim=(2, 3))

    def rank(self, tokens: Tokens, choice: Choice) -> Tensor:
        """Recent tokens first, then by score."""
        assert tokens.scores is not None
        recent = choice.targets - choice.targets // 2
        is_recent = tokens.positions >= choice.lengths - recent
        return tokens.scores.masked_fill(is_recent, torch.inf)


class H2O(EvictingMethod):
    """Heavy hitters by accumulated attention, plus recent tokens."""

    name = "h2o"
    paper = "arXiv:2306.14048"
    slot_overhead = POSITION_BYTES + SCORE_BYTES

    def evicting_layer(self, plan: SlotPlan) -> H2OLayer:
        """See :meth:`EvictingMethod.evicting_layer`."""
        return H2OLayer(plan)
