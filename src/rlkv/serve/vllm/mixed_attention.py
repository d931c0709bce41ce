"""Mixed attention in vLLM: alpha·full + (1 - alpha)·local for every KV head (paper eq. 1).

For rollouts while gates are learned, mode "mix" of the plugin. A layer has both sub-layers of
``split_attention`` over all of its heads, so keys of the sink and the window are stored twice and
no memory is saved. Gates live in a buffer of each layer and are overwritten in place, so that a
compiled graph reads new values; :class:`GateExtension` does that in every worker. Keys of deeper
layers depend on the gates: what is cached under old ones must not be read under new ones, so the
prefix cache is reset with every change (:func:`set_gates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from rlkv.errors import ConfigError
from rlkv.serve.geometry import rank_heads
from rlkv.serve.vllm.split_attention import LayerParts

if TYPE_CHECKING:
    from vllm import LLM

EXTENSION = "rlkv.serve.vllm.mixed_attention.GateExtension"
"""What vLLM's ``worker_extension_cls`` is set to, so that gates can be set while it runs."""


class MixAttention(nn.Module):
    """Takes the place of ``self_attn.attn`` in a decoder layer."""

    alpha: torch.Tensor

    def __init__(self, parts: LayerParts) -> None:
        """Builds both sub-layers over all heads; every gate starts at 1.

        Args:
            parts: Of the layer.
        """
        super().__init__()
        heads = parts.stock.num_kv_heads
        self.full = parts.full(heads)
        self.window = parts.window(heads)
        self._shape = (heads, parts.group_size, parts.stock.head_size)
        # a buffer, since vLLM expects to find every parameter in the checkpoint
        self.register_buffer("alpha", torch.ones(heads, dtype=torch.float32), persistent=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attends twice and mixes, in float32 as the trainer does.

        Args:
            query: (tokens, query_heads * head_dim).
            key: (tokens, kv_heads * head_dim).
            value: (tokens, kv_heads * head_dim).

        Returns:
            (tokens, query_heads * head_dim) in the dtype of ``query``.
        """
        full = self.full(query, key, value).unflatten(-1, self._shape)
        window = self.window(query, key, value).unflatten(-1, self._shape)
        # lerp is exact at 0 and at 1
        mixed = torch.lerp(window.float(), full.float(), self.alpha[:, None, None])
        return mixed.to(query.dtype).flatten(-3)


class GateExtension:
    """Mixed into vLLM's worker class: sets gates in the worker's model."""

    def rlkv_set_gates(self, rows: Sequence[Sequence[float]]) -> int:
        """Overwrites the gates of this worker's heads in place.

        Args:
            rows: (layers, kv_heads) gates of the whole model, in [0, 1].

        Returns:
            Gates set on this rank.

        Raises:
            ConfigError: The shape is not the model's, or the engine does not mix.
        """
        model: nn.Module = self.get_model()  # type: ignore[attr-defined]
        return write_gates(
            model, rows, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        )


def write_gates(
    model: nn.Module, rows: Sequence[Sequence[float]], rank: int = 0, ranks: int = 1
) -> int:
    """Overwrites the gates of a model that holds the heads of one tensor-parallel rank.

    Args:
        model: Its :class:`MixAttention` layers, in order, take one row each.
        rows: (layers, kv_heads) gates of the whole model, in [0, 1].
        rank: Tensor-parallel rank.
        ranks: Tensor-parallel size.

    Returns:
        Gates set.

    Raises:
        ConfigError: The shape is not the model's, or the model does not mix.
    """
    layers = [module for module in model.modules() if isinstance(module, MixAttention)]
    if not layers:
        raise ConfigError(
            'this engine has no gates to set; start it with additional_config={"rlkv": {"mode": '
            '"mix"}}'
        )
    widths = {len(row) for row in rows}
    inside = all(0.0 <= gate <= 1.0 for row in rows for gate in row)
    if len(rows) != len(layers) or len(widths) != 1 or not inside:
        raise ConfigError(
            f"{len(rows)} rows of {sorted(widths)} gates were given, expected one row for each of "
            f"{len(layers)} layers, all of one length, with gates in [0, 1]"
        )
    gates = torch.tensor(rows, dtype=torch.float32)
    mine = list(rank_heads(gates.shape[1], rank, ranks))
    if len(mine) != len(layers[0].alpha):
        raise ConfigError(
            f"gates of {gates.shape[1]} kv heads were given, which is {len(mine)} on each of "
            f"{ranks} ranks, expected {len(layers[0].alpha)}"
        )
    for layer, row in zip(layers, gates, strict=True):
        layer.alpha.copy_(row[mine])
    return len(mine) * len(layers)


def set_gates(llm: LLM, rows: Any) -> None:  # noqa: ANN401 - whatever has rows
    """Sets the gates of a running engine, on all its ranks, and forgets every cached prefix.

    Args:
        llm: An engine in mode "mix", started with ``worker_extension_cls=EXTENSION``, between two
            calls of ``generate``.
        rows: (layers, kv_heads) gates in [0, 1], nested sequences or an array.

    Raises:
        ConfigError: The shape is not the model's, or requests are running.
    """
    plain = [[float(gate) for gate in row] for row in rows]
    llm.collective_rpc("rlkv_set_gates", args=(plain,))
    if not llm.reset_prefix_cache():
        raise ConfigError(
            "gates were changed while requests were running, whose keys belong to the old gates; "
            "set gates between two calls of generate"
        )
