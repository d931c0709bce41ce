"""SplitKVLayer: full heads grow, local heads live in a ring of sink + recent tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from rlkv.attention.grouped import HeadGroup, HeadIndex
from rlkv.attention.step import Step
from rlkv.cache.growing import SPARE_SHARE, GrowingBuffer
from rlkv.cache.layer import CacheLayer, head_index, query_head_index
from rlkv.cache.ring import RingBuffer

PrefillMode = Literal["local", "full"]

_FULL_BLOCK = 1024
_LOCAL_BLOCK = 512


class SplitKVLayer(CacheLayer):
    """The cache of one layer, split by KV head.

    Args:
        is_full: One flag per KV head; False heads are local.
        group_size: Query heads per KV head.
        sink: First tokens a local head keeps.
        recent: Last tokens a local head sees.
        prefill: ``"local"``: local heads see sink + recent in the prompt too, exactly as in decode.
            ``"full"``: in the first pass every head sees the whole prompt (the paper's choice), and
            local heads are cut afterwards.
        draft_tokens: Tokens that generation may take back (prompt-lookup decoding).
        spare_share: One in how many tokens of full heads is spare room.
    """

    def __init__(
        self,
        is_full: Sequence[bool],
        group_size: int,
        *,
        sink: int,
        recent: int,
        prefill: PrefillMode = "local",
        draft_tokens: int = 0,
        spare_share: int = SPARE_SHARE,
    ) -> None:
        super().__init__()
        full = [head for head, keep in enumerate(is_full) if keep]
        local = [head for head, keep in enumerate(is_full) if not keep]
        self.num_kv_heads = len(is_full)
        self.prefill: PrefillMode = prefill
        self.full = GrowingBuffer(spare_share) if full else None
        self.ring = RingBuffer(sink, recent, draft_tokens) if local else None
        if full:
            self._full_kv = head_index(full, self.num_kv_heads)
            self._full_queries = query_head_index(full, self.num_kv_heads, group_size)
        if local:
            self._local_kv = head_index(local, self.num_kv_heads)
            self._local_queries = query_head_index(local, self.num_kv_heads, group_size)

    def append(self, keys: Tensor, values: Tensor, step: Step) -> Iterator[HeadGroup]:
        """See :meth:`CacheLayer.append`."""
        self.seen, self.rows = step.total, keys.shape[0]
        if self.full is not None:
            yield from self._full_groups(keys[:, self._full_kv], values[:, self._full_kv], step)
        if self.ring is not None:
            yield from self._local_groups(keys[:, self._local_kv], values[:, self._local_kv], step)

    def _full_groups(self, keys: Tensor, values: Tensor, step: Step) -> Iterator[HeadGroup]:
        assert self.full is not None
        all_keys, all_values = self.full.append(keys, values)
        yield from _causal_groups(self._full_queries, all_keys, all_values, step)

    def _local_groups(self, keys: Tensor, values: Tensor, step: Step) -> Iterator[HeadGroup]:
        assert self.ring is not None
        if step.new == 1:
            self.ring.write(keys, values, step, 0, 1)
            assert self.ring.keys is not None
            assert self.ring.values is not None
            mask = self.ring.mask_after_write(step)
            yield HeadGroup(self._local_queries, self.ring.keys, self.ring.values, mask)
        elif self.prefill == "full" and step.past == 0:
            self.ring.write(keys, values, step, 0, step.new)
            yield from _causal_groups(self._local_queries, keys, values, step)
        else:
            for start in range(0, step.new, _LOCAL_BLOCK):
                stop = min(start + _LOCAL_BLOCK, step.new)
                k, v = keys[:, :, start:stop], values[:, :, start:stop]
                seen_keys, seen_values, mask = self.ring.with_new(k, v, step, start, stop)
                self.ring.write(k, v, step, start, stop)
                end = None if stop == step.new else stop
                yield HeadGroup(
                    self._local_queries, seen_keys, seen_values, mask, start=start, stop=end
                )

    def nbytes(self) -> int:
        """See :meth:`CacheLayer.nbytes`."""
        return sum(part.nbytes() for part in (self.full, self.ring) if part is not None)

    def select_rows(self, rows: Tensor) -> None:
        """See :meth:`CacheLayer.select_rows`."""
        self.rows = len(rows)
        for part in (self.full, self.ring):
            if part is not None:
                part.select_rows(rows)

    @property
    def can_join(self) -> bool:
        """See :attr:`CacheLayer.can_join`; a ring's slots follow from the columns seen."""
        return self.ring is None

    def join(self, other: CacheLayer, columns: int) -> None:
        """See :meth:`CacheLayer.join`."""
        assert isinstance(other, SplitKVLayer)
        assert self.full is not None
        assert other.full is not None
        self.full.join(other.full)
        self.full.drop_left(columns)
        self.rows += other.rows
        self.seen = self.full.length

    def crop(self, columns: int) -> None:
        """See :meth:`CacheLayer.crop`."""
        # the ring first: it may refuse, and then nothing has changed
        for part in (self.ring, self.full):
            if part is not None:
                part.crop(columns)
        self.seen = min(self.seen, columns)

    def reset(self) -> None:
        """See :meth:`CacheLayer.reset`."""
        self.seen = self.rows = 0
        for part in (self.full, self.ring):
            if part is not None:
                part.reset()


def _causal_groups(
    query_heads: HeadIndex, keys: Tensor, values: Tensor, step: Step
) -> Iterator[HeadGroup]:
    """Causal attention over all ``step.total`` columns, in query blocks where a mask is needed."""
    if step.new == 1:
        mask = None if step.first_real is None else step.mask(0, 1)
        yield HeadGroup(query_heads, keys, values, mask)
    elif step.past == 0 and step.first_real is None:
        yield HeadGroup(query_heads, keys, values, causal=True)
    else:
        for start in range(0, step.new, _FULL_BLOCK):
            stop = min(start + _FULL_BLOCK, step.new)
            end = None if stop == step.new else stop
            upto = step.past + stop
            yield HeadGroup(
                query_heads,
                keys[:, :, :upto],
                values[:, :, :upto],
                step.mask(start, stop),
                start=start,
                stop=end,
            )
