"""What the window backends of all platforms share: one step's plan, and the layer's data flow.

A platform adds three things: how new keys are written, how the stock kernel is called, and whatever
work plan that kernel wants.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from rlkv.serve.geometry import UNIT
from rlkv.serve.vllm.kv_spec import SinkWindowSpec
from rlkv.serve.vllm.windows import Cut, PageShape, Tiles, cut_step, spread_tiles, unit_slots


@dataclass(slots=True)
class WindowMetadata:
    """One scheduler step, prepared once for all layers with the same head count."""

    tiles: Tiles
    """The step's queries and the units they read."""
    slots: torch.Tensor
    """(tokens * heads,) int64: where the new keys and values go."""
    tokens: int
    """New tokens of the step."""
    schedule: torch.Tensor | None
    """The kernel's own work plan, where it wants one."""


class SharedCut:
    """The part of a step's plan that layers of all head counts share; one for each model."""

    def __init__(self) -> None:
        self._step: CommonAttentionMetadata | None = None
        self._cut: Cut | None = None

    def of(self, step: CommonAttentionMetadata, page: PageShape, spec: SinkWindowSpec) -> Cut:
        """The cut of ``step``, made by the first layer that asks.

        vLLM makes one object for each step and hands it to every builder of a KV group.
        """
        if self._cut is None or self._step is not step:
            starts = step.query_start_loc_cpu[: step.num_reqs + 1].long()
            self._cut = cut_step(
                starts[1:] - starts[:-1],
                step.seq_lens[: step.num_reqs],
                step.block_table_tensor,
                page,
                sink=spec.sink,
                recent=spec.recent,
            )
            self._step = step
        return self._cut


class WindowBuilder(AttentionMetadataBuilder[WindowMetadata]):
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
        cut = self._layer.shared_cut.of(common, self._page, self._spec)
        tiles = spread_tiles(cut, self._page)
        slots = unit_slots(common.slot_mapping[: common.num_actual_tokens], self._page)
        return WindowMetadata(tiles, slots, common.num_actual_tokens, self.schedule(tiles))

    def schedule(self, tiles: Tiles) -> torch.Tensor | None:
        """The kernel's work plan for ``tiles``; none by default."""
        return None


class WindowImpl(AttentionImpl[WindowMetadata]):
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
        self.window = sink + recent
        # the cache is bound once; its views are the same in every step
        self._viewed: tuple[int, torch.Tensor, torch.Tensor] | None = None

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
            layer: The attention layer, part of vLLM's interface.
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
        tokens, rows = attn_metadata.tokens, attn_metadata.tiles.rows
        keys, values = self._views(kv_cache)
        self.write(
            key[:tokens].reshape(-1, 1, self.head_size),
            value[:tokens].reshape(-1, 1, self.head_size),
            keys,
            values,
            attn_metadata.slots,
            layer,
        )
        # (tokens * kv_heads, queries per head, head_dim): one row for each token and kv head
        queries = query[:tokens].reshape(-1, self.queries_per_head, self.head_size)
        result = output[:tokens].view(queries.shape)
        if rows is None:
            self.attend(queries, keys, values, result, attn_metadata)
            return output
        queries = queries.index_select(0, rows)
        found = torch.empty_like(queries)
        self.attend(queries, keys, values, found, attn_metadata)
        result.index_copy_(0, rows, found)
        return output

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        address = kv_cache.data_ptr()
        if self._viewed is None or self._viewed[0] != address:
            self._viewed = (address, *self.views(kv_cache))
        return self._viewed[1:]

    @abstractmethod
    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all units, as the kernel wants them."""

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        """Stores new keys and values, (tokens * kv_heads, 1, head_dim) each, at ``slots``."""

    @abstractmethod
    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        result: torch.Tensor,
        step: WindowMetadata,
    ) -> None:
        """Attends with (rows, queries per head, head_dim) queries and writes ``result``."""


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


def flat_units(kv_cache: torch.Tensor) -> torch.Tensor:
    """The pool from this layer's page on, as (units, UNIT * 2 * head_dim).

    A unit holds ``UNIT`` keys and values of one head. The units of other layers lie between and are
    never named.
    """
    unit = UNIT * kv_cache.shape[-1]
    offset = kv_cache.storage_offset()
    length = kv_cache.untyped_storage().nbytes() // kv_cache.element_size() - offset
    return kv_cache.as_strided((length // unit, unit), (unit, 1), offset)
