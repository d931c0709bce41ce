"""RingBuffer: sink tokens and a recent window in constant memory.

Position p lives in slot p while p < sink, else in slot sink + (p - sink) mod span. Keys carry their
position encoding and softmax does not care about order, so a slot is overwritten in place and
nothing is ever moved. Which position a slot holds follows from the row's last position alone:
nothing is stored twice, and left padding needs no special case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.attention.masks import visible
from rlkv.attention.step import Step
from rlkv.cache.layer import tensor_bytes
from rlkv.errors import UnsupportedFeatureError


class RingBuffer:
    """Keys and values of some local heads.

    Args:
        sink: First tokens kept.
        recent: Last tokens visible to a query, its own included.
        spare: Extra recent tokens held so that up to this many can be taken back (drafted tokens).
    """

    def __init__(self, sink: int, recent: int, spare: int = 0) -> None:
        self.sink, self.recent, self.spare = sink, recent, spare
        self.span = recent + spare
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0
        self._high = 0  # most columns ever written: slots beyond `length` hold forgotten tokens

    @property
    def slots(self) -> int:
        """Slots allocated now; at most sink + recent + spare."""
        return 0 if self.keys is None else self.keys.shape[2]

    def slot_positions(self, last: Tensor, slots: int) -> Tensor:
        """(rows, slots) int64: the position in each slot once ``last`` is written; -1 for none.

        Args:
            last: (rows,) int64, each row's last position.
            slots: Number of slots.
        """
        slot = torch.arange(slots, device=last.device)[None]
        last = last[:, None]
        newest = last - torch.remainder(last - slot, self.span)
        position = torch.where(slot < self.sink, slot.expand_as(newest), newest)
        held = (position >= slot) & (position <= last)
        return torch.where(held, position, torch.full_like(position, -1))

    def with_new(
        self, keys: Tensor, values: Tensor, step: Step, start: int, stop: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries of columns start..stop of a pass see, before those columns are written.

        Args:
            keys: (batch, heads, stop - start, head_dim), the new columns.
            values: Same shape.
            step: The pass.
            start: First column within the pass.
            stop: One past the last.

        Returns:
            Keys and values (batch, heads, slots + new, head_dim), and a mask (batch or 1, 1, new,
            slots + new) bool.
        """
        slots = self.slots

        def build() -> Tensor:
            queries = step.positions(step.past + start, step.past + stop)
            held = self.slot_positions(step.last_positions(step.past + start), slots)
            both = torch.cat([held, queries], dim=1)
            return visible(queries, both, sink=self.sink, recent=self.recent)

        mask = step.memoize(("ring", start, stop, slots, self.sink, self.recent, self.spare), build)
        if self.keys is None or self.values is None:
            return keys, values, mask
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2), mask

    def mask_after_write(self, step: Step) -> Tensor | None:
        """(batch or 1, 1, 1, slots) bool for one new column just written; None: all visible."""
        slots = self.slots
        # more slots than tokens: after a crop some still hold what was taken back
        if step.first_real is None and not self.spare and slots <= step.total:
            return None

        def build() -> Tensor | None:
            held = self.slot_positions(step.last_positions(step.total), slots)
            queries = step.positions(step.past, step.total)
            mask = visible(queries, held, sink=self.sink, recent=self.recent)
            return None if bool(mask.all()) else mask

        return step.memoize(("slots", slots, self.sink, self.recent, self.spare), build)

    def write(self, keys: Tensor, values: Tensor, step: Step, start: int, stop: int) -> None:
        """Stores columns start..stop of a pass, overwriting what leaves the window.

        Args:
            keys: (batch, heads, stop - start, head_dim).
            values: Same shape.
            step: The pass.
            start: First column within the pass; the ring holds all columns before it.
            stop: One past the last.
        """
        total = step.past + stop
        self._reserve(keys, values, min(self.sink + self.span, total))
        assert self.keys is not None
        assert self.values is not None
        if stop - start == 1 and step.first_real is None:
            slot = self._slot(total - 1)
            self.keys[:, :, slot] = keys[:, :, 0]
            self.values[:, :, slot] = values[:, :, 0]
        else:
            self._gather(keys, values, step, start, stop)
        self.length = total
        self._high = max(self._high, total)

    def _slot(self, position: int) -> int:
        if position < self.sink:
            return position
        return self.sink + (position - self.sink) % self.span

    def _reserve(self, keys: Tensor, values: Tensor, slots: int) -> None:
        missing = slots - self.slots
        if missing <= 0:
            return
        batch, heads, _, head_dim = keys.shape
        room = keys.new_zeros(batch, heads, missing, head_dim)
        self.keys = room if self.keys is None else torch.cat([self.keys, room], 2)
        room = values.new_zeros(batch, heads, missing, head_dim)
        self.values = room if self.values is None else torch.cat([self.values, room], 2)

    def _gather(self, keys: Tensor, values: Tensor, step: Step, start: int, stop: int) -> None:
        """Each slot takes the new column it must hold now, or keeps what it has."""
        assert self.keys is not None
        assert self.values is not None
        slots = self.slots

        def build() -> tuple[Tensor, Tensor]:
            wanted = self.slot_positions(step.last_positions(step.past + stop), slots)
            column = wanted - (step.past + start)
            if step.first_real is not None:
                column = column + step.first_real[:, None]
            return (wanted >= 0) & (column >= 0), column.clamp(0, stop - start - 1)

        is_new, column = step.memoize(
            ("write", start, stop, slots, self.sink, self.recent, self.spare), build
        )
        batch, heads, _, head_dim = keys.shape
        index = column[:, None, :, None].expand(batch, heads, slots, head_dim)
        chosen = is_new[:, None, :, None]
        self.keys = torch.where(chosen, keys.gather(2, index), self.keys)
        self.values = torch.where(chosen, values.gather(2, index), self.values)

    def crop(self, columns: int) -> None:
        """See :meth:`CacheLayer.crop`.

        Raises:
            UnsupportedFeatureError: More tokens would be taken back than ``spare`` allows.
        """
        if columns >= self.length:
            return
        if self._high > self.sink + self.span and self._high - columns > self.spare:
            raise UnsupportedFeatureError(
                f"generation takes back {self._high - columns} cached tokens, but local heads can "
                f"restore {self.spare}; pass draft_tokens={self._high - columns} or more to "
                "rlkv.compress (prompt-lookup and assisted decoding need it)"
            )
        self.length = columns

    def select_rows(self, rows: Tensor) -> None:
        """See :meth:`CacheLayer.select_rows`."""
        if self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def reset(self) -> None:
        """Drops the memory."""
        self.keys = self.values = None
        self.length = self._high = 0

    def nbytes(self) -> int:
        """Bytes allocated."""
        return tensor_bytes(self.keys, self.values)
