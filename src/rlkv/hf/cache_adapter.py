"""RLKV's cache layers in transformers' Cache clothes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from rlkv.cache.layer import CacheLayer, tensor_bytes
from rlkv.errors import UnsupportedFeatureError
from rlkv.hf.attention import PendingKV
from rlkv.hf.compat import columns_after_crop


@dataclass(frozen=True, slots=True)
class Origin:
    """The `with` block that a cache was made in."""

    made_by: str
    """Function that opened the block, such as ``compress``."""
    is_attached: Callable[[], bool]
    """Whether RLKV is attached to the block's model now, by this block or another."""

    def require_attached(self) -> None:
        """Refuses a pass through the model without RLKV, which cannot read the cache.

        Raises:
            UnsupportedFeatureError: No `with` block is open.
        """
        if not self.is_attached():
            raise UnsupportedFeatureError(
                f"a cache of rlkv.{self.made_by} was passed outside its `with` block, where the "
                "model cannot read it; go on inside the block, or start without a cache"
            )

    def require_same(self, made_by: str) -> None:
        """Refuses a cache whose layers hold something else than the open block expects.

        Raises:
            UnsupportedFeatureError: It was made by another function.
        """
        if self.made_by != made_by:
            raise UnsupportedFeatureError(
                f"a cache of rlkv.{self.made_by} was passed inside rlkv.{made_by}, expected one "
                "made in this block; start without a cache, or pass session.new_cache()"
            )


class LayerAdapter(CacheLayerMixin):
    """One RLKV cache layer, as transformers wants to see it."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, layer: CacheLayer, origin: Origin) -> None:
        super().__init__()
        self.layer, self.origin = layer, origin
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: RLKV's layers take device and dtype from the first keys."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PendingKV, PendingKV]:  # type: ignore[override]
        """Passes new keys and values on to the attention function, which knows the padding.

        Raises:
            UnsupportedFeatureError: RLKV is not attached to the model any more.
        """
        self.origin.require_attached()
        pending = PendingKV(self.layer, key_states, value_states)
        return pending, pending

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns after this pass, 0); older transformers pass cache_position instead."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.layer.seen + new, 0

    def get_seq_length(self) -> int:
        """Columns seen so far, whatever was evicted: positions of new tokens start here."""
        return self.layer.seen

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Takes tokens back, as transformers' own layers do."""
        self.layer.crop(columns_after_crop(tokens_to_remove, self.layer.seen))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders rows for beam search."""
        self.layer.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times."""
        self.layer.select_rows(torch.arange(self.layer.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        self.layer.select_rows(indices)

    def reset(self) -> None:
        """Forgets everything."""
        self.layer.reset()

    def offload(self) -> None:
        """Refused: a compressed cache is small enough to stay where it is."""
        raise UnsupportedFeatureError(
            "cache offloading was asked for, but RLKV's cache cannot be offloaded; leave out "
            "offloading, or raise the sparsity"
        )

    prefetch = offload


class RLKVCache(Cache):
    """A transformers Cache whose full-attention layers are RLKV's.

    Args:
        layers: One per model layer: RLKV's, or a stock layer where the model is left alone.
        origin: The `with` block that makes it.
    """

    def __init__(self, layers: Sequence[CacheLayer | CacheLayerMixin], origin: Origin) -> None:
        wrapped = [LayerAdapter(x, origin) if isinstance(x, CacheLayer) else x for x in layers]
        super().__init__(layers=wrapped)
        self.origin = origin

    def rlkv_layers(self) -> list[CacheLayer]:
        """RLKV's own layers, in order."""
        return [layer.layer for layer in self.layers if isinstance(layer, LayerAdapter)]

    def nbytes(self) -> int:
        """Bytes of all tensors the cache holds."""
        return cache_bytes(self)

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``, in every layer."""
        for layer in self.layers:
            # every stock layer has the method, though their common base does not declare it
            layer.batch_select_indices(rows)  # type: ignore[union-attr]

    @property
    def can_join(self) -> bool:
        """Whether rows of another cache can be added by :meth:`join`."""
        layers = self.rlkv_layers()
        return len(layers) == len(self.layers) and all(layer.can_join for layer in layers)

    def join(self, other: RLKVCache, columns: int) -> None:
        """See :meth:`CacheLayer.join`, in every layer."""
        for layer, more in zip(self.rlkv_layers(), other.rlkv_layers(), strict=True):
            layer.join(more, columns)


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that any transformers cache holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LayerAdapter):
            total += layer.layer.nbytes()
        else:
            total += tensor_bytes(*(t for t in vars(layer).values() if isinstance(t, Tensor)))
    return total


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that the model makes for itself."""
    return DynamicCache(config=model.config)
