"""``rlkv bench decode``: time per decode step and KV bytes, stock cache and RLKV's side by side.

All variants are stepped in turn, step by step, so a busy machine slows all of them alike and ratios
stay meaningful. Caches are filled with random keys and values of the right shape instead of a real
prefill: the time of a decode step does not depend on what is in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from rlkv.attention.step import Step
from rlkv.core.head_profile import HeadProfile
from rlkv.hf.attach import Session, compress
from rlkv.hf.cache_adapter import Cache, LayerAdapter, RLKVCache, cache_bytes, stock_cache
from rlkv.hf.compat import with_cache
from rlkv.hf.loading import LoadedModel

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class DecodeGrid:
    """What to measure."""

    sparsities: Sequence[float] = (0.0, 0.5, 0.75)
    """Shares of KV heads to compress, besides the stock cache."""
    contexts: Sequence[int] = (256, 1024, 4096)
    """Tokens in the cache when decoding starts."""
    batches: Sequence[int] = (1, 8)
    """Rows decoded together."""
    sink: int = 16
    """First tokens a compressed head keeps."""
    recent: int = 64
    """Last tokens a compressed head keeps."""
    steps: int = 16
    """Timed decode steps of each variant; the median is reported."""


@dataclass(slots=True)
class _Variant:
    """One cache being stepped."""

    name: str
    sparsity: float
    attach: Callable[[], AbstractContextManager[Session | None]]
    cache: Cache
    seconds: list[float] = field(default_factory=list)

    def kv_bytes(self) -> int:
        return cache_bytes(self.cache)


def decode_rows(
    loaded: LoadedModel, grid: DecodeGrid, profile: HeadProfile | None = None
) -> Iterator[dict[str, object]]:
    """Rows ``{model, cache, sparsity, context, batch, ms_per_token, kv_bytes}``.

    ``ms_per_token`` is the median wall time of one decode step of the whole batch; ``kv_bytes`` is
    what the cache's tensors hold at the end, all rows together.

    Args:
        loaded: Model to measure.
        grid: Contexts, batches and sparsities.
        profile: Heads to keep; None draws them at random (seed 0).
    """
    for batch in grid.batches:
        for context in grid.contexts:
            variants = _variants(loaded, grid, profile, batch, context)
            _step_in_turn(loaded, variants, batch, grid.steps)
            for variant in variants:
                yield {
                    "model": loaded.spec.model_id,
                    "cache": variant.name,
                    "sparsity": variant.sparsity,
                    "context": context,
                    "batch": batch,
                    "ms_per_token": round(1000 * statistics.median(variant.seconds), 3),
                    "kv_bytes": variant.kv_bytes(),
                }


def _variants(
    loaded: LoadedModel, grid: DecodeGrid, profile: HeadProfile | None, batch: int, context: int
) -> list[_Variant]:
    stock = stock_cache(loaded.model)
    variants = [_Variant("stock", 0.0, nullcontext, stock)]
    for layer in stock.layers:
        layer.update(*_random_kv(loaded, batch, context))  # type: ignore[union-attr]
    for sparsity in grid.sparsities:

        def attach(sparsity: float = sparsity) -> AbstractContextManager[Session]:
            return compress(
                loaded.model,
                method="random_heads" if profile is None else "rlkv",
                profile=profile,
                sparsity=sparsity,
                sink=grid.sink,
                recent=grid.recent,
                spec=loaded.spec,
            )

        with attach() as session:
            cache = session.new_cache()
        _fill(loaded, cache, batch, context)
        variants.append(_Variant("rlkv", sparsity, attach, cache))
    return variants


def _fill(loaded: LoadedModel, cache: RLKVCache, batch: int, context: int) -> None:
    for adapter in cache.layers:
        if isinstance(adapter, LayerAdapter):
            step = Step(batch, 0, context, None, loaded.model.device)
            for _ in adapter.layer.append(*_random_kv(loaded, batch, context), step):
                pass  # groups are handed out as they are stored; nothing attends here


def _random_kv(loaded: LoadedModel, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec = loaded.spec
    shape = (batch, spec.num_kv_heads, context, spec.head_dim)
    kind = {"dtype": loaded.model.dtype, "device": loaded.model.device}
    return torch.randn(shape, **kind), torch.randn(shape, **kind)


@torch.inference_mode()
def _step_in_turn(loaded: LoadedModel, variants: list[_Variant], batch: int, steps: int) -> None:
    token = torch.ones(batch, 1, dtype=torch.int64, device=loaded.model.device)
    for number in range(_WARM_UP + steps):
        for variant in variants:
            with variant.attach():
                arguments = with_cache(loaded.model, {"use_cache": True}, variant.cache)
                _synchronize(loaded)
                start = time.perf_counter()
                loaded.model(token, **arguments)
                _synchronize(loaded)
                if number >= _WARM_UP:
                    variant.seconds.append(time.perf_counter() - start)


def _synchronize(loaded: LoadedModel) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
