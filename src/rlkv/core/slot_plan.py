"""SlotPlan: how many tokens a method that evicts by score may hold, at every length.

All KV heads of such a method hold equally many tokens. In the mode ``"equal"`` the keys, values,
positions, scores and cached queries together never take more bytes than the head split of the same
:class:`Budget`; the other modes are the looser rules of the methods' own authors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkv.core.budget import Budget
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError

BudgetMode = Literal["equal", "authors", "fixed"]

_LONGEST_INTERVAL = 128
_INTERVAL_SHARE = 8
_GROWTH_SHARE = 512


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Token slots of one layer as a function of a row's length alone.

    Up to :attr:`whole_until` tokens nothing is evicted. In the mode ``"equal"`` nothing but keys
    and values is held there: the head split is the full cache too, and any score would be one byte
    too many.

    Example:
        >>> spec = ModelSpec("m", "", num_layers=2, num_kv_heads=4, num_query_heads=8, head_dim=64)
        >>> plan = SlotPlan(spec, Budget(0.5), layer=0, slot_overhead=8)
        >>> plan.slots(80), plan.slots(1000), Budget(0.5).tokens_per_head(1000)
        (80, 523, 540)
    """

    spec: ModelSpec
    """The model's KV heads."""
    budget: Budget
    """Sparsity and window of the head split whose bytes are the measure."""
    layer: int
    """Layer, 0 to ``spec.num_layers`` - 1: the remainder of a division is spread over layers."""
    mode: BudgetMode = "equal"
    """``"equal"``: the head split's bytes. ``"authors"``: (1 - s)·n + window tokens, whatever else
    is held. ``"fixed"``: :attr:`tokens` tokens at any length."""
    tokens: int = 0
    """Tokens per KV head in the mode ``"fixed"``."""
    slot_overhead: int = 0
    """Bytes per slot and KV head beside key and value: position, score."""
    queries: int = 0
    """Last queries that are kept for scoring, in tokens."""
    in_intervals: bool = False
    """True where eviction is costly and so happens once for several tokens."""

    @property
    def whole_until(self) -> int:
        """Longest length, in tokens, at which everything is kept."""
        if self.mode == "fixed":
            return self.tokens + self._buffer - 1
        if self.mode == "equal":
            return self.budget.window
        # the first length that (1 - s)·n + window + buffer does not cover, less one
        length = int((self._authors_slots(0) - 1) / self.budget.sparsity) + 2
        while length > self._authors_slots(length) - 1:
            length -= 1
        return max(1, length)

    @property
    def scores_from_start(self) -> bool:
        """Whether scores are held before anything is evicted: not where their bytes count."""
        return self.mode != "equal"

    def slots(self, length: int) -> int:
        """Slots that may be allocated per KV head for a row of ``length`` tokens."""
        if length <= self.whole_until:
            return length
        if self.mode == "fixed":
            return self.tokens + self._buffer
        if self.mode == "authors":
            return self._authors_slots(length)
        return min(length, self._equal_slots(length))

    def after(self, length: int) -> int:
        """Tokens that a row may hold after a pass ending at ``length``: the next one has room."""
        if length <= self.whole_until:
            return length
        # the authors count the next token outside of the budget: slots() includes room for it
        most = self.slots(length) - (self.mode != "equal")
        return max(1, min(most, self.slots(length + 1) - 1))

    def target(self, length: int) -> int:
        """Tokens to cut a row down to once it holds more than :meth:`after`."""
        return max(1, self.after(length) - self._interval(length) + 1)

    def queries_held(self, length: int) -> int:
        """Queries per query head that a row of ``length`` tokens keeps for scoring."""
        return min(self.queries, max(0, length - self.whole_until))

    def require_room(self) -> None:
        """Checks that some tokens fit beside the cached queries.

        Raises:
            ConfigError: They do not.
        """
        if self.mode == "fixed" and self.tokens <= self.queries:
            raise ConfigError(
                f"budget_tokens {self.tokens} leaves no room beside {self.queries} query tokens; "
                "use a larger number, such as the authors' 128"
            )
        tightest = self.slots(self.whole_until + max(1, self.queries))
        if tightest < max(2, self.queries):
            raise ConfigError(
                f"{self.queries} cached queries leave {tightest} tokens of sink {self.budget.sink} "
                f"+ recent {self.budget.recent} at sparsity {self.budget.sparsity}; use a larger "
                "window"
            )

    @property
    def _buffer(self) -> int:
        """Tokens that the authors let the cache grow by between two compressions."""
        return _LONGEST_INTERVAL if self.in_intervals else 1

    @property
    def _query_tokens(self) -> int:
        """Tokens per KV head whose key and value take as much room as the cached queries."""
        return self.spec.group_size * self.queries // 2

    def _authors_slots(self, length: int) -> int:
        kept = int(length * (1.0 - self.budget.sparsity) + 1e-9) + self.budget.window
        return max(1, kept - self._query_tokens) + self._buffer

    def _interval(self, length: int) -> int:
        if not self.in_intervals:
            return 1
        if self.mode != "equal":
            return _LONGEST_INTERVAL
        return min(_LONGEST_INTERVAL, max(1, self.slots(length) // _INTERVAL_SHARE))

    def _equal_slots(self, length: int) -> int:
        spec = self.spec
        query_bytes = spec.num_query_heads * spec.head_dim * spec.dtype_bytes
        free = self.budget.kv_bytes(spec, length)
        free -= spec.num_layers * self.queries_held(length) * query_bytes
        one_slot = spec.num_kv_heads * (spec.bytes_per_token_per_head + self.slot_overhead)
        rows = free // one_slot
        layer, layers = self.layer, spec.num_layers
        slots = rows * (layer + 1) // layers - rows * layer // layers
        # growing by one slot at a time would copy the cache at every token; 1/512 is not missed
        step = 1
        while step * 2 * _GROWTH_SHARE <= slots:
            step *= 2
        return max(1, slots // step * step)
