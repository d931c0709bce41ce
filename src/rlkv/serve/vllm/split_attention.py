"""One attention layer as two vLLM sub-layers: full heads and compressed heads.

The heads of the layer were put in order when the weights were loaded (``heads``), so the split is
two slices of the projections' output, and the two results are joined end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from rlkv.serve.geometry import Geometry
from rlkv.serve.vllm.kv_spec import SinkWindowSpec
from rlkv.serve.vllm.window_base import SharedCut


@dataclass(frozen=True, slots=True)
class Backends:
    """The attention backends of a platform."""

    full: type[AttentionBackend]
    """For full heads."""
    window: type[AttentionBackend]
    """For compressed heads."""


class FullHeads(Attention):
    """Full heads of one layer, in blocks of the geometry's size."""

    def __init__(self, geometry: Geometry, *, is_padded: bool, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._block = geometry.full_block
        self._is_padded = is_padded

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The paged cache of these heads."""
        spec = FullAttentionSpec(
            block_size=self._block,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
        )
        return _padded(spec) if self._is_padded else spec


class WindowHeads(Attention):
    """Compressed heads of one layer: sink and recent window."""

    def __init__(
        self, geometry: Geometry, shared_cut: SharedCut, *, is_padded: bool, **options: object
    ) -> None:
        super().__init__(sink=geometry.sink, recent=geometry.recent, **options)  # type: ignore[arg-type]
        self.shared_cut = shared_cut
        self._geometry = geometry
        self._is_padded = is_padded

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The constant-size cache of these heads."""
        geometry = self._geometry
        spec = SinkWindowSpec(
            block_size=geometry.window_block,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            sink=geometry.sink,
            recent=geometry.recent,
            in_flight=vllm_config.max_in_flight_tokens,
            full_block=geometry.full_block if geometry.full_heads else 0,
            context=vllm_config.model_config.max_model_len,
            pool_block_bytes=geometry.block_rows
            * 2
            * self.head_size
            * self.kv_cache_torch_dtype.itemsize
            * vllm_config.parallel_config.tensor_parallel_size,
        )
        return _padded(spec) if self._is_padded else spec


def _padded(spec: FullAttentionSpec | SinkWindowSpec) -> KVCacheSpec:
    """The spec with a page one head longer, see ``geometry``."""
    from dataclasses import replace

    extra = spec.unpadded_page_size_bytes // spec.num_kv_heads
    return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + extra)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Makes the two sub-layers that take the place of vLLM's own attention in one layer."""

    stock: Attention
    """vLLM's own attention, whose shape and name are taken over."""
    layer: int
    """Index of the decoder layer."""
    geometry: Geometry
    """Block sizes."""
    backends: Backends
    """Attention backends of the platform."""
    cache_config: CacheConfig
    """vLLM's cache settings."""
    shared_cut: SharedCut
    """What the compressed heads of all layers share in a step."""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.stock.num_heads // self.stock.num_kv_heads

    def full(self, heads: int) -> FullHeads:
        """A sub-layer of ``heads`` full KV heads."""
        options = self._options("full", heads)
        return FullHeads(self.geometry, attn_backend=self.backends.full, **options)

    def window(self, heads: int) -> WindowHeads:
        """A sub-layer of ``heads`` compressed KV heads."""
        options = self._options("window", heads)
        return WindowHeads(
            self.geometry, self.shared_cut, attn_backend=self.backends.window, **options
        )

    def _options(self, kind: str, heads: int) -> dict[str, Any]:
        return {
            "is_padded": (kind, self.layer) in self.geometry.padded,
            "num_heads": heads * self.group_size,
            "head_size": self.stock.head_size,
            "scale": self.stock.impl.scale,
            "num_kv_heads": heads,
            "cache_config": self.cache_config,
            "prefix": f"{self.stock.layer_name}_{kind}",
        }


class SplitAttention(nn.Module):
    """Takes the place of ``self_attn.attn`` in a decoder layer."""

    def __init__(self, parts: LayerParts, full_heads: int) -> None:
        """Builds the two sub-layers.

        Args:
            parts: Of the layer.
            full_heads: Full KV heads of this layer on this rank, the first ones.
        """
        super().__init__()
        compressed = parts.stock.num_kv_heads - full_heads
        self._full_width = full_heads * parts.stock.head_size
        self._query_width = self._full_width * parts.group_size
        self.full = parts.full(full_heads) if full_heads else None
        self.window = parts.window(compressed) if compressed else None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attends with both parts.

        Args:
            query: (tokens, query_heads * head_dim), full heads first.
            key: (tokens, kv_heads * head_dim), full heads first.
            value: (tokens, kv_heads * head_dim), full heads first.

        Returns:
            (tokens, query_heads * head_dim), full heads first.
        """
        if self.window is None:
            return self.full(query, key, value)
        if self.full is None:
            return self.window(query, key, value)
        q, kv = self._query_width, self._full_width
        full = self.full(query[:, :q], key[:, :kv], value[:, :kv])
        window = self.window(query[:, q:], key[:, kv:], value[:, kv:])
        return torch.cat((full, window), dim=-1)
