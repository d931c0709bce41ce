"""GPU attention: the selected stock backend for full heads, Triton for compressed ones.

Checked with Triton's interpreter on a CPU; never run on a GPU. It stays off until it was, unless
``additional_config["rlkv"]["untested_gpu"]`` is true.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionLayer
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVCacheLayout

from rlkv.errors import UnsupportedFeatureError
from rlkv.serve.geometry import UNIT
from rlkv.serve.vllm.window_base import (
    WindowBuilder,
    WindowImpl,
    WindowMetadata,
    flat_units,
)

_FULL_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")


class TritonWindowBackend(TritonAttentionBackend):
    """Sink and recent window through vLLM's Triton kernel, see ``windows``."""

    forward_includes_kv_cache_update: bool = True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost: pages of any head count side by side."""
        return (KVCacheLayout.BLHNC,)

    @staticmethod
    def get_impl_cls() -> type[TritonWindowImpl]:
        """The class that runs one layer."""
        return TritonWindowImpl

    @staticmethod
    def get_builder_cls() -> type[WindowBuilder]:
        """The class that prepares one scheduler step; not captured in CUDA graphs."""
        return WindowBuilder


class TritonWindowImpl(WindowImpl):
    """vLLM's Triton kernel; a unit holds, token by token, a key and its value."""

    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(units, UNIT, 1, head_dim) keys, and values of the same shape."""
        units = flat_units(kv_cache).view(-1, UNIT, 1, 2 * self.head_size)
        return units[..., : self.head_size], units[..., self.head_size :]

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        """Stores new keys and values; negative slots are skipped by the kernel."""
        triton_reshape_and_cache_flash(
            key, value, keys, values, slots, "auto", layer._k_scale, layer._v_scale
        )

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        result: torch.Tensor,
        step: WindowMetadata,
    ) -> None:
        """A causal sliding window over the reordered units."""
        tiles = step.tiles
        unified_attention(
            q=queries,
            k=keys,
            v=values,
            out=result,
            cu_seqlens_q=tiles.query_start,
            max_seqlen_q=tiles.longest_query,
            seqused_k=tiles.seq_lens,
            max_seqlen_k=tiles.block_table.shape[1] * UNIT,
            softmax_scale=self.scale,
            causal=True,
            window_size=(self.window - 1, 0),
            block_table=tiles.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )


def full_backend(stock: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend that vLLM selected, held to the layout that both kinds of heads share.

    Raises:
        UnsupportedFeatureError: vLLM selected another backend than FlashAttention or Triton.
    """
    if stock.get_name() not in _FULL_BACKENDS:
        raise UnsupportedFeatureError(
            f"attention backend {stock.get_name()} cannot be combined with compressed heads; start "
            f"with --attention-backend {_FULL_BACKENDS[0]}"
        )

    def layouts(cls: type[AttentionBackend]) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    body = {"supported_kv_cache_layouts": classmethod(layouts), "__module__": __name__}
    return type(f"FullHeads{stock.__name__}", (stock,), body)
