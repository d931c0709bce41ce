"""Attention backends on the CPU: stock kernels for full heads and for compressed heads.

Both keep vLLM's backend name, since vLLM only accepts names it knows, and both ask for a cache
layout with whole blocks outermost, so that layers with different head counts pack side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    _get_attn_isa,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from rlkv.serve.geometry import UNIT
from rlkv.serve.vllm.kv_spec import SinkWindowSpec
from rlkv.serve.vllm.windows import PageShape, Tiles, cut_tiles, unit_slots


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


@dataclass(slots=True)
class WindowMetadata:
    """One scheduler step, prepared once for all layers with the same head count."""

    tiles: Tiles
    """The step's queries and the units they read."""
    slots: torch.Tensor
    """(tokens * heads,) int64: where the new keys and values go."""
    tokens: int
    """New tokens of the step."""
    schedule: torch.Tensor
    """The kernel's own work plan."""


class CPUWindowBuilder(AttentionMetadataBuilder[WindowMetadata]):
    """Cuts each scheduler step into tiles."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not isinstance(kv_cache_spec, SinkWindowSpec):
            raise TypeError(f"expected a SinkWindowSpec, found {type(kv_cache_spec).__name__}")
        self._spec = kv_cache_spec
        self._layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._isa = window_isa(kv_cache_spec.dtype, kv_cache_spec.head_size)
        self._page: PageShape | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WindowMetadata:
        """Prepares one scheduler step."""
        common = common_attn_metadata
        if self._page is None:
            self._page = page_shape(self._layer.kv_cache)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        tiles = cut_tiles(
            starts[1:] - starts[:-1],
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor,
            self._page,
            sink=self._spec.sink,
            recent=self._spec.recent,
        )
        schedule = ops.cpu_attn_get_scheduler_metadata(
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
        slots = unit_slots(common.slot_mapping[: common.num_actual_tokens], self._page)
        return WindowMetadata(tiles, slots, common.num_actual_tokens, schedule)


class CPUWindowImpl(AttentionImpl[WindowMetadata]):
    """Runs the compressed heads of one layer."""

    supports_quant_query_input: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sink: int,
        recent: int,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.queries_per_head = num_heads // self.num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._window = sink + recent
        self._isa = ""
        # the cache is bound once; its views are the same in every step
        self._viewed: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value halves of all units, (units, 1, UNIT, head_dim) each."""
        address = kv_cache.data_ptr()
        if self._viewed is None or self._viewed[0] != address:
            keys, values = unit_view(kv_cache).chunk(2, dim=2)
            self._viewed = (address, keys, values)
        return self._viewed[1:]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: WindowMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the new keys and values, then attends.

        Args:
            layer: The attention layer; unused, part of vLLM's interface.
            query: (tokens, query_heads, head_dim).
            key: (tokens, kv_heads, head_dim).
            value: (tokens, kv_heads, head_dim).
            kv_cache: (blocks, kv_heads, block tokens, 2 * head_dim), strided by whole blocks.
            attn_metadata: The prepared step, or None in a memory profiling run.
            output: (tokens, query_heads, head_dim), written.
            output_scale: Unused, part of vLLM's interface.
            output_block_scale: Unused, part of vLLM's interface.
        """
        if attn_metadata is None:
            return output
        tokens, tiles = attn_metadata.tokens, attn_metadata.tiles
        if not self._isa:
            self._isa = window_isa(key.dtype, self.head_size)
        key_units, value_units = self._views(kv_cache)
        ops.cpu_attn_reshape_and_cache(
            key[:tokens].reshape(-1, 1, self.head_size),
            value[:tokens].reshape(-1, 1, self.head_size),
            key_units,
            value_units,
            attn_metadata.slots,
            self._isa,
        )
        # (tokens * kv_heads, queries per head, head_dim): one row for each token and kv head
        queries = query[:tokens].reshape(-1, self.queries_per_head, self.head_size)
        rows = output[:tokens].view(queries.shape)
        if tiles.rows is not None:
            queries = queries.index_select(0, tiles.rows)
        result = torch.empty_like(queries) if tiles.rows is not None else rows
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_units,
            value_cache=value_units,
            output=result,
            query_start_loc=tiles.query_start,
            seq_lens=tiles.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self._window,
            block_table=tiles.block_table,
            softcap=0.0,
            scheduler_metadata=attn_metadata.schedule,
            s_aux=None,
        )
        if tiles.rows is not None:
            rows.index_copy_(0, tiles.rows, result)
        return output


def window_isa(dtype: torch.dtype, head_size: int) -> str:
    """The kernel variant that stock vLLM would take for blocks of ``UNIT`` tokens."""
    return _get_attn_isa(dtype, UNIT, head_size)


def page_shape(kv_cache: torch.Tensor) -> PageShape:
    """Where a layer's heads lie, from its cache (blocks, kv_heads, block tokens, 2 * head_dim)."""
    _, heads, tokens, width = kv_cache.shape
    unit = UNIT * width
    stride = kv_cache.stride(0)
    if stride % unit or tokens % UNIT:
        raise RuntimeError(
            f"vLLM laid out blocks of {stride} numbers, which units of {unit} do not divide; this "
            "vLLM packs pages in a way that RLKV does not know"
        )
    return PageShape(heads, tokens // UNIT, stride // unit)


def unit_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """The pool from this layer's page on, as (units, 1, 2 * UNIT, head_dim).

    A unit holds ``UNIT`` keys of one head, then their values; the units of other layers lie between
    and are never named.
    """
    _, _, _, width = kv_cache.shape
    head_dim, unit = width // 2, UNIT * width
    offset = kv_cache.storage_offset()
    length = kv_cache.untyped_storage().nbytes() // kv_cache.element_size() - offset
    return kv_cache.as_strided(
        (length // unit, 1, 2 * UNIT, head_dim), (unit, unit, head_dim, 1), offset
    )
