"""GrowingBuffer: keys and values of full heads, appended in place.

Concatenating every step copies the whole cache every step. This buffer keeps 1/128 of its length
as spare room: the copy is paid every length/128 steps, and memory stays within 1 % of what is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.cache.layer import tensor_bytes

SPARE_SHARE = 128


class GrowingBuffer:
    """Keys and values of some heads, all tokens kept.

    Args:
        spare_share: One in how many tokens is spare room; fewer copies the smaller it is.
    """

    def __init__(self, spare_share: int = SPARE_SHARE) -> None:
        self.spare_share = spare_share
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens and returns all of them, as views.

        Args:
            keys: (batch, heads, new, head_dim).
            values: (batch, heads, new, head_dim).

        Returns:
            Keys and values, (batch, heads, length, head_dim) each.
        """
        needed = self.length + keys.shape[2]
        if self.keys is None or self.values is None:
            # a copy of just these heads: a view would keep the whole projection alive
            self.keys = keys.clone(memory_format=torch.contiguous_format)
            self.values = values.clone(memory_format=torch.contiguous_format)
            self.length = needed
            return self.keys, self.values
        if self.keys.shape[2] < needed:
            capacity = needed + needed // self.spare_share
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)
        self.keys[:, :, self.length : needed] = keys
        self.values[:, :, self.length : needed] = values
        self.length = needed
        return self.keys[:, :, :needed], self.values[:, :, :needed]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        batch, heads, _, head_dim = old.shape
        new = old.new_empty(batch, heads, capacity, head_dim)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def crop(self, length: int) -> None:
        """Forgets all but the first ``length`` tokens and frees their memory."""
        if self.keys is not None and self.values is not None and length < self.length:
            self.keys = self.keys[:, :, :length].clone()
            self.values = self.values[:, :, :length].clone()
            self.length = length

    def select_rows(self, rows: Tensor) -> None:
        """See :meth:`CacheLayer.select_rows`."""
        if self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def join(self, other: GrowingBuffer) -> None:
        """Adds the rows of ``other``; the shorter buffer is filled up with zeros on the left."""
        assert self.keys is not None
        assert self.values is not None
        assert other.keys is not None
        assert other.values is not None
        length = max(self.length, other.length)
        mine, theirs = slice(None, self.length), slice(None, other.length)
        self.keys = _stacked(self.keys[:, :, mine], other.keys[:, :, theirs], length)
        self.values = _stacked(self.values[:, :, mine], other.values[:, :, theirs], length)
        self.length = length

    def drop_left(self, columns: int) -> None:
        """Forgets the first ``columns`` tokens, which are padding in every row."""
        if self.keys is not None and self.values is not None and columns:
            self.keys = self.keys[:, :, columns : self.length].clone()
            self.values = self.values[:, :, columns : self.length].clone()
            self.length -= columns

    def reset(self) -> None:
        """Drops the memory."""
        self.keys = self.values = None
        self.length = 0

    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        return tensor_bytes(self.keys, self.values)


def _stacked(above: Tensor, below: Tensor, length: int) -> Tensor:
    """Rows of both, (rows, heads, length, head_dim), zeros in front of the shorter one."""
    rows = above.shape[0]
    out = above.new_zeros(rows + below.shape[0], above.shape[1], length, above.shape[3])
    out[:rows, :, length - above.shape[2] :] = above
    out[rows:, :, length - below.shape[2] :] = below
    return out
