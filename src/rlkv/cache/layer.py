"""CacheLayer: what one attention layer remembers, and what its queries may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlkv.attention.grouped import HeadGroup, HeadIndex
from rlkv.attention.step import Step


class CacheLayer(ABC):
    """The KV cache of one attention layer.

    ``seen`` counts the columns appended so far, padding included, whatever was evicted; ``rows`` is
    the batch size.
    """

    needs_probs: bool = False
    """True while :meth:`observe` must see attention probabilities (excludes fused kernels)."""

    def __init__(self) -> None:
        self.seen = 0
        self.rows = 0

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, step: Step) -> Iterable[HeadGroup]:
        """Stores new keys and values and hands out what this pass's queries attend to.

        Args:
            keys: (batch, kv_heads, new, head_dim), after position encoding.
            values: (batch, kv_heads, new, head_dim).
            step: The pass; ``step.past`` equals :attr:`seen`.

        Returns:
            Groups that together cover every head and query once; to be consumed to the end.
        """

    def observe(  # noqa: B027 - most layers need no look at the probabilities
        self, group: HeadGroup, queries: Tensor, probs: Tensor
    ) -> None:
        """Sees the attention of one group of the pass just appended.

        Args:
            group: The group as handed out by :meth:`append`.
            queries: (batch, query_heads of the group, queries, head_dim).
            probs: (batch, heads, group_size, queries, tokens) float32.
        """

    def finish(  # noqa: B027 - most layers have nothing left to do
        self, queries: Tensor, scale: float
    ) -> None:
        """Ends a pass, after its attention; evicting layers decide here.

        Args:
            queries: (batch, query_heads, new, head_dim), all queries of the pass.
            scale: Factor on the scores.
        """

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of every tensor this layer holds between passes."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders batch rows: row i becomes the old row ``rows[i]``."""

    @property
    def can_join(self) -> bool:
        """Whether rows of another layer can be added by :meth:`join`."""
        return False

    def join(self, other: CacheLayer, columns: int) -> None:
        """Adds the rows of ``other``, last columns side by side, then forgets the first columns.

        Args:
            other: A layer of the same kind, which is not used any more.
            columns: How many first columns are padding in every row, and go.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take other rows")

    @abstractmethod
    def crop(self, columns: int) -> None:
        """Forgets all but the first ``columns`` columns.

        Raises:
            UnsupportedFeatureError: The layer no longer holds what it would need.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything; the layer can serve a new batch."""


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the memory that the given tensors occupy."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def head_index(heads: Sequence[int], num_heads: int) -> HeadIndex:
    """An index for ``heads``: a slice where they are contiguous, since a slice copies nothing."""
    if len(heads) == num_heads:
        return slice(None)
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return slice(heads[0], heads[0] + len(heads))
    return torch.tensor(heads, dtype=torch.int64)


def query_head_index(kv_heads: Sequence[int], num_kv_heads: int, group_size: int) -> HeadIndex:
    """The query heads that belong to ``kv_heads``, in order."""
    queries = [h * group_size + i for h in kv_heads for i in range(group_size)]
    return head_index(queries, num_kv_heads * group_size)
