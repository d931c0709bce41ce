"""EvictingLayer: every KV head keeps its best-scored tokens, within a budget of slots.

Keys carry their position encoding and are never rotated again, so a slot may hold any token: its
absolute position is kept beside it. A subclass says what is worth keeping (:meth:`rank`); this
class stores, frees and masks. What a row keeps follows from that row alone: its budget counts its
real tokens, and slots that a shorter row may not use are masked.

A layer starts whole: up to ``plan.whole_until`` tokens it is an ordinary cache without positions
and, where the budget counts them, without scores. The first longer pass turns it into slots. A pass
over several tokens sees the slots and all of its own tokens, and is cut to the budget afterwards.
In a padded batch whose longest row has just become slots, a slightly shorter one that is still
whole sets the number of slots for both, for the few steps until it becomes slots too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkv.attention.grouped import HeadGroup
from rlkv.attention.masks import visible
from rlkv.attention.step import Step
from rlkv.cache.layer import CacheLayer, tensor_bytes
from rlkv.core.slot_plan import SlotPlan
from rlkv.errors import UnsupportedFeatureError

POSITION_BYTES = 4
SCORE_BYTES = 4

_BLOCK = 1024
_OBSERVED_BLOCK = 256  # probabilities of a block are held in float32 for all heads
_NO_POSITION = torch.iinfo(torch.int32).max


@dataclass(slots=True)
class Tokens:
    """Tokens that a head may choose from."""

    keys: Tensor
    """(batch, heads, tokens, head_dim)."""
    values: Tensor
    """(batch, heads, tokens, head_dim)."""
    positions: Tensor
    """(batch or 1, heads or 1, tokens) int; negative for padding and for an empty slot."""
    scores: Tensor | None
    """(batch, heads, tokens) float32, where the layer scores tokens as it goes."""


@dataclass(slots=True)
class Choice:
    """What :meth:`EvictingLayer.rank` needs to know about each row, (batch, 1, 1) int64 each."""

    lengths: Tensor
    """Real tokens of the row so far."""
    targets: Tensor
    """Tokens it will keep."""


class EvictingLayer(CacheLayer):
    """The cache of one layer whose heads keep what they rank highest.

    Args:
        plan: Slots at every length.
    """

    keeps_scores: ClassVar[bool] = False
    """True where a score travels with every token, see :attr:`Tokens.scores`."""
    keeps_order: ClassVar[bool] = False
    """True where slots must stay in the order of their positions (scores pooled along them)."""

    def __init__(self, plan: SlotPlan) -> None:
        super().__init__()
        self.plan = plan
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions: Tensor | None = None  # (batch, heads, slots) int32; None while whole
        self.scores: Tensor | None = None  # (batch, heads, slots) float32
        self.counts: list[int] = []  # filled slots of each row; empty while whole
        self._step: Step | None = None
        self._joined: Tokens | None = None  # slots and new tokens of a pass that is not in place

    @abstractmethod
    def rank(self, tokens: Tokens, choice: Choice) -> Tensor:
        """What to keep first: (batch, heads, tokens) float, higher is better, +inf is certain.

        Tokens with a negative position do not matter. Ties go to the earlier slot.
        """

    def append(self, keys: Tensor, values: Tensor, step: Step) -> Iterable[HeadGroup]:
        """See :meth:`CacheLayer.append`."""
        self.seen, self.rows, self._step = step.total, keys.shape[0], step
        if step.new == 1 and self._reserve():
            return [self._write_one(keys, values, step)]
        self._joined = self._join(keys, values, step)
        return self._blocks(self._joined, step)

    def finish(self, queries: Tensor, scale: float) -> None:
        """Cuts every row to its budget, and makes room for its next token."""
        lengths = self.lengths()
        if self._joined is not None:
            joined, self._joined = self._joined, None
            if max(lengths) <= self.plan.whole_until and self.positions is None:
                # a copy of its own: a view would keep the whole projection alive
                first = self.keys is None
                self.keys = joined.keys.clone() if first else joined.keys
                self.values = joined.values.clone() if first else joined.values
                if self.plan.scores_from_start:
                    self.scores = joined.scores
            else:
                if self.keeps_order and self.counts:
                    joined = _in_order(joined)
                new = self.step.new
                held = [min(new, n) for n in lengths] if self.counts else lengths
                counts = [c + n for c, n in zip(self.counts or [0] * self.rows, held, strict=True)]
                self._compress(joined, counts, lengths)
        elif self.positions is not None:
            self._trim(lengths)
        self._step = None

    @property
    def step(self) -> Step:
        """The pass between :meth:`append` and :meth:`finish`."""
        assert self._step is not None
        return self._step

    def lengths(self) -> list[int]:
        """Real tokens of each row after the current pass."""
        return row_lengths(self.step, self.rows)

    def _reserve(self) -> bool:
        """Makes the slots that the new lengths allow; True where every row has one free."""
        if self.positions is None or self.keys is None or self.values is None:
            return False
        slots = self.positions.shape[2]
        missing = max(self.plan.slots(n) for n in self.lengths()) - slots
        if missing > 0:
            self.keys = _padded(self.keys, missing, 0)
            self.values = _padded(self.values, missing, 0)
            self.positions = _padded(self.positions, missing, -1)
            if self.scores is not None:
                self.scores = _padded(self.scores, missing, 0)
            slots += missing
        return max(self.counts) < slots

    def _write_one(self, keys: Tensor, values: Tensor, step: Step) -> HeadGroup:
        """Puts one token per row into each head's first free slot."""
        assert self.keys is not None
        assert self.values is not None
        assert self.positions is not None
        rows, heads, _, head_dim = keys.shape
        free = self.positions.argmin(dim=-1, keepdim=True)  # an empty slot holds -1
        index = free[..., None].expand(rows, heads, 1, head_dim)
        self.keys.scatter_(2, index, keys)
        self.values.scatter_(2, index, values)
        new = step.positions(step.past, step.total).to(torch.int32)
        self.positions.scatter_(2, free, new[:, None].expand(rows, heads, 1))
        if self.scores is not None:
            self.scores.scatter_(2, free, 0.0)
        self.counts = [count + 1 for count in self.counts]
        # where slots fill up in order, those that no row has reached need no mask
        used = max(self.counts) if self.keeps_order else self.positions.shape[2]
        mask = None
        if min(self.counts) < used:
            mask = (self.positions[:, :, :used] >= 0)[:, :, None]
        return HeadGroup(slice(None), self.keys[:, :, :used], self.values[:, :, :used], mask)

    def _join(self, keys: Tensor, values: Tensor, step: Step) -> Tokens:
        """Everything held, followed by the new tokens."""
        scores = None
        if self.positions is None:
            positions = step.positions(0, step.total)[:, None]
        else:
            new = step.positions(step.past, step.total)[:, None].to(torch.int32)
            new = new.expand(*self.positions.shape[:2], step.new)
            positions = torch.cat([self.positions, new], 2)
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        if self.keeps_scores:
            scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
            if self.scores is not None:
                scores[:, :, : self.scores.shape[2]] = self.scores
        return Tokens(keys, values, positions, scores)

    def _blocks(self, joined: Tokens, step: Step) -> Iterator[HeadGroup]:
        """Causal attention over the joined tokens, in blocks of queries."""
        plain = self.positions is None and step.first_real is None
        if plain and (step.new == 1 or (step.past == 0 and not self.needs_probs)):
            yield HeadGroup(slice(None), joined.keys, joined.values, causal=step.new > 1)
            return
        block = _OBSERVED_BLOCK if self.needs_probs else _BLOCK
        held = joined.keys.shape[2] - step.new
        for start in range(0, step.new, block):
            stop = min(start + block, step.new)
            upto = held + stop
            queries = step.positions(step.past + start, step.past + stop)
            mask = visible(queries, joined.positions[:, :, :upto])
            end = None if stop == step.new else stop
            keys, values = joined.keys[:, :, :upto], joined.values[:, :, :upto]
            yield HeadGroup(slice(None), keys, values, mask, start=start, stop=end)

    def _trim(self, lengths: list[int]) -> None:
        """Frees a slot in every row that is full, after a token written in place."""
        assert self.keys is not None
        assert self.values is not None
        assert self.positions is not None
        plan = self.plan
        over = [c > plan.after(n) for c, n in zip(self.counts, lengths, strict=True)]
        shrink = max(plan.slots(n) for n in lengths) < self.positions.shape[2]
        one_each = all(
            c - plan.target(n) == 1
            for c, n, full in zip(self.counts, lengths, over, strict=True)
            if full
        )
        tokens = Tokens(self.keys, self.values, self.positions, self.scores)
        if shrink or (any(over) and (self.keeps_order or not one_each)):
            self._compress(tokens, self.counts, lengths)
            return
        self._forget_short_rows(lengths)
        if any(over):
            targets = [c - full for c, full in zip(self.counts, over, strict=True)]
            rank = self._rank(tokens, lengths, targets)
            worst = rank.masked_fill(self.positions < 0, torch.inf).argmin(dim=-1, keepdim=True)
            full = self._column(over)
            emptied = torch.where(full, -1, self.positions.gather(2, worst))
            self.positions.scatter_(2, worst, emptied.to(torch.int32))
            self.counts = targets

    def _compress(self, tokens: Tokens, counts: list[int], lengths: list[int]) -> None:
        """Gathers what each row keeps into slots of their own, oldest first."""
        plan, keys = self.plan, tokens.keys
        targets = [
            c if c <= plan.after(n) else plan.target(n)
            for c, n in zip(counts, lengths, strict=True)
        ]
        positions = tokens.positions.expand(keys.shape[:3])
        if targets == counts:  # nothing to evict, only to put in place
            rank = torch.zeros(keys.shape[:3], device=keys.device)
        else:
            rank = self._rank(tokens, lengths, targets)
        rank = rank.masked_fill(positions < 0, -torch.inf)
        best = rank.sort(dim=-1, descending=True, stable=True).indices[:, :, : max(targets)]
        kept = positions.gather(2, best)
        order = torch.arange(best.shape[2], device=keys.device)
        kept = kept.masked_fill((kept < 0) | (order >= self._column(targets)), _NO_POSITION)
        kept, order = kept.sort(dim=-1)
        index = best.gather(2, order)
        spare = max(plan.slots(n) for n in lengths) - max(targets)
        wide = index[..., None].expand(*index.shape, keys.shape[3])
        self.keys = _padded(keys.gather(2, wide), spare, 0)
        self.values = _padded(tokens.values.gather(2, wide), spare, 0)
        kept = kept.masked_fill(kept == _NO_POSITION, -1).to(torch.int32)
        self.positions = _padded(kept, spare, -1)
        if tokens.scores is not None:
            self.scores = _padded(tokens.scores.gather(2, index), spare, 0)
        self.counts = targets
        self._forget_short_rows(lengths)

    def _rank(self, tokens: Tokens, lengths: list[int], targets: list[int]) -> Tensor:
        return self.rank(tokens, Choice(self._column(lengths), self._column(targets)))

    def _column(self, numbers: list[int] | list[bool]) -> Tensor:
        """(batch, 1, 1), one number a row."""
        assert self._step is not None
        return torch.tensor(numbers, device=self._step.device)[:, None, None]

    def _forget_short_rows(self, lengths: list[int]) -> None:
        """A row still whole holds no scores: it must go on as it would alone."""
        if self.plan.scores_from_start:
            return
        if self.scores is not None and min(lengths) <= self.plan.whole_until:
            short = self._column([n <= self.plan.whole_until for n in lengths])
            self.scores.masked_fill_(short, 0.0)

    def nbytes(self) -> int:
        """See :meth:`CacheLayer.nbytes`."""
        return tensor_bytes(self.keys, self.values, self.positions, self.scores)

    def select_rows(self, rows: Tensor) -> None:
        """See :meth:`CacheLayer.select_rows`."""
        self.rows = len(rows)
        if self.keys is None or self.values is None:
            return
        index = rows.to(self.keys.device)
        self.keys = self.keys.index_select(0, index)
        self.values = self.values.index_select(0, index)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, index)
            self.counts = [self.counts[row] for row in rows.tolist()]
        if self.scores is not None:
            self.scores = self.scores.index_select(0, index)

    def crop(self, columns: int) -> None:
        """See :meth:`CacheLayer.crop`.

        Raises:
            UnsupportedFeatureError: Tokens were evicted already.
        """
        if columns >= self.seen:
            return
        if self.positions is not None:
            raise UnsupportedFeatureError(
                f"generation takes back {self.seen - columns} cached tokens, but this method has "
                "evicted others for them; generate without prompt-lookup or assisted decoding, or "
                "use a method that splits heads, such as rlkv, with draft_tokens"
            )
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, :columns].clone()
            self.values = self.values[:, :, :columns].clone()
        if self.scores is not None:
            self.scores = self.scores[:, :, :columns].clone()
        self.seen = columns

    def reset(self) -> None:
        """See :meth:`CacheLayer.reset`."""
        self.seen = self.rows = 0
        self.keys = self.values = self.positions = self.scores = None
        self.counts = []
        self._step = self._joined = None


def row_lengths(step: Step, rows: int) -> list[int]:
    """Real tokens of each row after the pass."""
    first_real = step.first_real
    if first_real is None:
        return [step.total] * rows
    return step.memoize("lengths", lambda: [step.total - int(c) for c in first_real.tolist()])


def _in_order(tokens: Tokens) -> Tokens:
    """The same tokens by position, empty slots last: none may stand between two neighbours."""
    order = tokens.positions.masked_fill(tokens.positions < 0, _NO_POSITION).argsort(dim=-1)
    wide = order[..., None].expand(*order.shape, tokens.keys.shape[3])
    scores = None if tokens.scores is None else tokens.scores.gather(2, order)
    keys, values = tokens.keys.gather(2, wide), tokens.values.gather(2, wide)
    return Tokens(keys, values, tokens.positions.gather(2, order), scores)


def _padded(tensor: Tensor, missing: int, value: float) -> Tensor:
    """``tensor`` with ``missing`` more entries of ``value`` along axis 2."""
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[2] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], 2)
