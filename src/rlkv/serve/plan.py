"""How many requests and tokens fit, computed before anything loads.

The same geometry that the plugin hands to vLLM is applied to a pool of a given size, so that the
figures are those that vLLM reports at start (`Maximum concurrency`). Only the pool itself is an
estimate: what activations and captured graphs take is known once the model runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from rlkv.core.budget import Budget
from rlkv.core.head_profile import HeadProfile
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError
from rlkv.serve.geometry import UNIT, Geometry, HeadSplit, choose_geometry, split_heads

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class PlanRow(TypedDict):
    """One sparsity of a plan."""

    sparsity: float
    """Share of KV heads compressed; 0 is stock vLLM."""
    kv_bytes_per_token: int
    """Bytes that each further token of a request takes, on all GPUs together."""
    constant_bytes_per_request: int
    """Bytes that a request takes besides, for its windows, on all GPUs together."""
    max_requests: float
    """Requests of the full context that fit at once."""
    max_tokens: int
    """Tokens of such requests that fit at once."""


@dataclass(frozen=True, slots=True)
class Pool:
    """KV memory of one tensor-parallel rank, and what runs in it."""

    bytes_per_rank: int
    """KV memory of each rank, in bytes."""
    context: int
    """Length of every request, in tokens."""
    ranks: int = 1
    """Tensor-parallel size."""


def plan_rows(
    spec: ModelSpec,
    pool: Pool,
    sparsities: Sequence[float],
    *,
    profile: HeadProfile | None = None,
    sink: int = 16,
    recent: int = 64,
) -> list[PlanRow]:
    """Capacity at each sparsity.

    Args:
        spec: Shape of the model.
        pool: KV memory and request length.
        sparsities: Shares of KV heads to compress.
        profile: Decides which heads are full, which matters for rounding under tensor parallelism;
            without one, heads are taken in turn from all layers.
        sink: First tokens that a compressed head keeps.
        recent: Last tokens that a compressed head keeps.

    Raises:
        ConfigError: A setting is out of range, or not one request fits at any sparsity.
    """
    chosen = profile or _even_profile(spec)
    chosen.require_match(spec, any_model=True)
    rows: list[PlanRow] = []
    for sparsity in sparsities:
        budget = Budget(sparsity, sink=sink, recent=recent)
        split = split_heads(chosen.full_heads(sparsity), chosen.scores, pool.ranks)
        rows.append(_row(spec, pool, budget, split))
    if not any(row["max_requests"] for row in rows):
        raise ConfigError(
            f"{pool.bytes_per_rank / 2**30:.2f} GiB of KV memory cannot hold one request of "
            f"{pool.context} tokens at any of these sparsities; give more memory or a shorter "
            "--context"
        )
    return rows


def _row(spec: ModelSpec, pool: Pool, budget: Budget, split: HeadSplit) -> PlanRow:
    geometry = (
        choose_geometry(split, sink=budget.sink, recent=budget.recent, context=pool.context)
        if split.compressed_heads
        else _stock_geometry(split, budget)
    )
    block_bytes = geometry.block_rows * spec.bytes_per_token_per_head
    blocks = pool.bytes_per_rank // block_bytes
    held = geometry.blocks(pool.context)
    # vLLM keeps one block for itself; where one request does not fit, none is planned
    requests = blocks / held if blocks - 1 >= held else 0.0
    # without full heads nothing grows with the request
    growing = block_bytes // geometry.full_block if geometry.full_heads else 0
    return {
        "sparsity": budget.sparsity,
        "kv_bytes_per_token": growing * pool.ranks,
        "constant_bytes_per_request": geometry.window_blocks(pool.context)
        * block_bytes
        * pool.ranks,
        "max_requests": round(requests, 2),
        "max_tokens": int(requests * pool.context),
    }


def _stock_geometry(split: HeadSplit, budget: Budget) -> Geometry:
    full = split.full_heads
    return Geometry(UNIT, UNIT, full * UNIT, budget.sink, budget.recent, full, 0)


def _even_profile(spec: ModelSpec) -> HeadProfile:
    """Scores that rank one head of every layer before the second head of any layer."""
    layers, heads = spec.shape
    scores = np.linspace(1.0, 0.0, heads, dtype=np.float32)[None, :].repeat(layers, axis=0)
    return HeadProfile(spec, scores, "none")


def parse_size(text: str) -> int:
    """Bytes or tokens from text such as ``80GiB``, ``24 GB``, ``32k`` or ``4096``.

    A bare ``k`` or ``M`` counts in 1024s, as context lengths are named; ``GB`` counts in 1000s.

    Raises:
        ConfigError: The text is no positive size.

    Example:
        >>> parse_size("32k"), parse_size("1.5GiB"), parse_size("2GB")
        (32768, 1610612736, 2000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"size {text!r} is not understood; write 80GiB, 24GB, 32k or 4096")
    number, prefix, suffix = float(match[1]), match[2], match[3]
    scale = _UNITS[prefix] if suffix == "b" else _BINARY.get(prefix, 1)
    size = int(number * scale)
    if size < 1:
        raise ConfigError(f"size {text!r} is zero; write 80GiB, 24GB, 32k or 4096")
    return size
