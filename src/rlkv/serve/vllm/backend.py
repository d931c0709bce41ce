"""Attention backends on the CPU: stock kernels for full heads and for compressed heads.

Both keep vLLM's backend name, since vLLM only accepts names it knows, and both ask for a cache
layout with whole blocks outermost, so that layers with different head counts pack side by side.
"""

from __future__ import annotations

from functools import cache

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from rlkv.serve.geometry import UNIT
from rlkv.serve.vllm.window_base import (
    WindowBuilder,
    WindowImpl,
    WindowMetadata,
    flat_units,
)
from rlkv.serve.vllm.windows import Tiles


class CPUFullHeadsBackend(CPUAttentionBackend):
    """Stock CPU attention over a block-outermost cache."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost: pages of any head count side by side."""
        return (KVCacheLayout.BLHNC,)

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """The kernels take multiples of 16 tokens, though stock vLLM announces 32."""
        return [MultipleOf(UNIT)]


class CPUWindowBackend(CPUFullHeadsBackend):
    """Sink and recent window through the stock CPU kernel, see ``windows``."""

    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[CPUWindowImpl]:
        """The class that runs one layer."""
        return CPUWindowImpl

    @staticmethod
    def get_builder_cls() -> type[CPUWindowBuilder]:
        """The class that prepares one scheduler step."""
        return CPUWindowBuilder


class CPUWindowBuilder(WindowBuilder):
    """Adds the CPU kernel's work plan."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._isa = window_isa(kv_cache_spec.dtype, kv_cache_spec.head_size)

    def schedule(self, tiles: Tiles) -> torch.Tensor:
        """How the kernel spreads the tiles over threads."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(tiles.seq_lens),
            num_heads=self._layer.impl.queries_per_head,
            num_kv_heads=1,
            head_dim=self._spec.head_size,
            seq_lens=tiles.seq_lens,
            dtype=self._spec.dtype,
            query_start_loc=tiles.query_start,
            causal=True,
            sliding_window_size=self._spec.sink + self._spec.recent,
            isa=self._isa,
            enable_kv_split=False,
        )


class CPUWindowImpl(WindowImpl):
    """The stock CPU kernel; a unit holds its keys, packed for the processor, then its values."""

    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(units, 1, UNIT, head_dim) keys, and values of the same shape."""
        units = flat_units(kv_cache).view(-1, 1, 2 * UNIT, self.head_size)
        keys, values = units.chunk(2, dim=2)
        return keys, values

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        """Stores new keys and values in the processor's packing."""
        isa = window_isa(key.dtype, self.head_size)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        result: torch.Tensor,
        step: WindowMetadata,
    ) -> None:
        """A causal sliding window over the reordered units."""
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=result,
            query_start_loc=step.tiles.query_start,
            seq_lens=step.tiles.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self.window,
            block_table=step.tiles.block_table,
            softcap=0.0,
            scheduler_metadata=step.schedule,
            s_aux=None,
        )


@cache
def window_isa(dtype: torch.dtype, head_size: int) -> str:
    """The kernel variant that stock vLLM would take for blocks of ``UNIT`` tokens."""
    return _get_attn_isa(dtype, UNIT, head_size)
