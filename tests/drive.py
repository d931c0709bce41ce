"""Feeds random queries, keys and values to one cache layer, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkv.attention.grouped import grouped_attention
from rlkv.attention.step import Step
from rlkv.cache.layer import CacheLayer
from rlkv.core.model_spec import ModelSpec

SPEC = ModelSpec(
    "m", "", num_layers=2, num_kv_heads=3, num_query_heads=6, head_dim=8, dtype_bytes=4
)
SCALE = SPEC.head_dim**-0.5


@dataclass(frozen=True)
class Sequence:
    """Queries (batch, query_heads, tokens, head_dim), keys and values (batch, kv_heads, ...)."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    first_real: Tensor | None = None

    def row(self, row: int) -> Sequence:
        """One row alone, without its padding."""
        start = 0 if self.first_real is None else int(self.first_real[row])
        parts = (x[row : row + 1, :, start:] for x in (self.queries, self.keys, self.values))
        return Sequence(*parts)


def random_sequence(rows: int, tokens: int, seed: int = 0, spec: ModelSpec = SPEC) -> Sequence:
    """Normal numbers; queries are three times larger, so that attention is selective."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, spec.head_dim)
    queries = 3 * torch.randn(rows, spec.num_query_heads, *shape, generator=generator)
    keys = torch.randn(rows, spec.num_kv_heads, *shape, generator=generator)
    values = torch.randn(rows, spec.num_kv_heads, *shape, generator=generator)
    return Sequence(queries, keys, values)


def drive(layer: CacheLayer, sequence: Sequence, sizes: list[int], past: int = 0) -> Tensor:
    """Attention output of all columns fed in passes of ``sizes``, starting at column ``past``."""
    parts = []
    for size in sizes:
        stop = past + size
        rows = sequence.keys.shape[0]
        step = Step(rows, past, size, sequence.first_real, torch.device("cpu"))
        queries = sequence.queries[:, :, past:stop]
        groups = layer.append(
            sequence.keys[:, :, past:stop], sequence.values[:, :, past:stop], step
        )
        observe = layer.observe if layer.needs_probs else None
        parts.append(grouped_attention(queries, groups, scale=SCALE, observe=observe))
        layer.finish(queries, SCALE)
        past = stop
    return torch.cat(parts, 2)


def held_positions(layer, row: int = 0, head: int = 0) -> list[int]:
    """Positions that a head holds, sorted."""
    return sorted(p for p in layer.positions[row, head].tolist() if p >= 0)
